/** A box of a tensor as runs of its canonical bytes, in rising order (SPEC 13, step 5). */
import { fail } from "./errors.js";
import type { Tensor } from "./manifest.js";

/** Per axis: the first index, and the one after the last. */
export type AxisRange = readonly [start: number, stop: number];

export function checkRanges(tensor: Tensor, ranges: readonly AxisRange[]): void {
  if (ranges.length !== tensor.shape.length) fail("input-invalid", "a slice needs one range per axis");
  ranges.forEach(([start, stop], axis) => {
    const whole = Number.isSafeInteger(start) && Number.isSafeInteger(stop);
    if (!whole || start < 0 || stop < start || stop > tensor.shape[axis]) {
      fail("input-invalid", `[${start}, ${stop}] is not a range of axis ${axis}`);
    }
  });
}

/** The runs of a slice. All have the same length; none is empty. */
export class Runs {
  readonly runBytes: number;
  readonly count: number;
  private readonly sizes: number[];
  private readonly strides: number[];
  private readonly base: number;

  constructor(tensor: Tensor, ranges: readonly AxisRange[]) {
    const { shape, bits } = tensor;
    let inner = 1;
    const strides = new Array<number>(shape.length);
    for (let axis = shape.length - 1; axis >= 0; axis--) {
      strides[axis] = inner;
      inner *= shape[axis];
    }
    // Whole axes at the end, and one more, are contiguous.
    let split = shape.length;
    while (split > 0 && ranges[split - 1][0] === 0 && ranges[split - 1][1] === shape[split - 1]) split--;
    const outer = Math.max(split - 1, 0);
    const first = split > 0 ? ranges[outer][0] * strides[outer] : 0;
    const run = split > 0 ? (ranges[outer][1] - ranges[outer][0]) * strides[outer] : inner;
    this.sizes = ranges.slice(0, outer).map(([start, stop]) => stop - start);
    const bytes = (elements: number): number => {
      const total = elements * bits;
      if (total % 8 !== 0) fail("not-supported", "a slice that does not fall on whole bytes");
      return total / 8;
    };
    const empty = ranges.some(([start, stop]) => start === stop);
    this.count = empty ? 0 : this.sizes.reduce((product, size) => product * size, 1);
    this.runBytes = empty ? 0 : bytes(run);
    this.strides = this.sizes.map((size, axis) => (size > 1 && !empty ? bytes(strides[axis]) : 0));
    const start = ranges.slice(0, outer).reduce((sum, [from], axis) => sum + from * strides[axis], first);
    this.base = empty ? 0 : bytes(start);
  }

  get bytes(): number {
    return this.count * this.runBytes;
  }

  /** Where each run begins in the tensor. */
  *[Symbol.iterator](): Generator<number> {
    const { sizes, strides, count } = this;
    const index = sizes.map(() => 0);
    let at = this.base;
    for (let i = 0; i < count; i++) {
      yield at;
      for (let axis = sizes.length - 1; axis >= 0; axis--) {
        at += strides[axis];
        if (++index[axis] < sizes[axis]) break;
        at -= sizes[axis] * strides[axis];
        index[axis] = 0;
      }
    }
  }

  /** The blocks that hold a part of a run, each once, rising. */
  *blocks(blockBytes: number): Generator<number> {
    let last = -1;
    for (const start of this) {
      const end = Math.floor((start + this.runBytes - 1) / blockBytes);
      for (let block = Math.max(last + 1, Math.floor(start / blockBytes)); block <= end; block++) {
        yield block;
        last = block;
      }
    }
  }
}

/** Copies runs out of blocks that come in rising order. */
export class SliceCopier {
  private readonly runs: Iterator<number>;
  private start: number | undefined;
  private to = 0;

  constructor(private readonly shape: Runs, readonly out: Uint8Array) {
    this.runs = shape[Symbol.iterator]();
    this.advance();
  }

  private advance(): void {
    const { done, value } = this.runs.next();
    this.start = done === true ? undefined : value;
  }

  block(blockStart: number, bytes: Uint8Array): void {
    const { runBytes } = this.shape;
    const blockEnd = blockStart + bytes.length;
    while (this.start !== undefined && this.start < blockEnd) {
      const from = Math.max(this.start, blockStart);
      const runEnd = this.start + runBytes;
      const end = Math.min(runEnd, blockEnd);
      this.out.set(bytes.subarray(from - blockStart, end - blockStart), this.to + from - this.start);
      if (runEnd > blockEnd) return;
      this.to += runBytes;
      this.advance();
    }
  }
}
