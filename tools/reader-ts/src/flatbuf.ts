/**
 * Reads FlatBuffers tables in place. Every access is within `view`: DataView throws a RangeError beyond it, and vectors
 * are checked as a whole. Nothing is followed that was not asked for, so no input makes it loop.
 */
export class FlatTable {
  private readonly vtable: number;
  private readonly vsize: number;

  constructor(readonly view: DataView, private readonly at: number) {
    this.vtable = at - view.getInt32(at, true);
    this.vsize = view.getUint16(this.vtable, true);
  }

  static root(view: DataView): FlatTable {
    return new FlatTable(view, view.getUint32(0, true));
  }

  /** Where field `id` lies, or 0 if it is absent. */
  private field(id: number): number {
    const slot = 4 + 2 * id;
    if (slot + 2 > this.vsize) return 0;
    const offset = this.view.getUint16(this.vtable + slot, true);
    return offset === 0 ? 0 : this.at + offset;
  }

  u8(id: number): number {
    const at = this.field(id);
    return at === 0 ? 0 : this.view.getUint8(at);
  }

  i16(id: number): number {
    const at = this.field(id);
    return at === 0 ? 0 : this.view.getInt16(at, true);
  }

  i32(id: number): number {
    const at = this.field(id);
    return at === 0 ? 0 : this.view.getInt32(at, true);
  }

  i64(id: number): number {
    const at = this.field(id);
    return at === 0 ? 0 : readI64(this.view, at);
  }

  table(id: number): FlatTable | null {
    const at = this.field(id);
    return at === 0 ? null : new FlatTable(this.view, at + this.view.getUint32(at, true));
  }

  vector(id: number, elementSize: number): { start: number; length: number } {
    const at = this.field(id);
    if (at === 0) return { start: 0, length: 0 };
    const head = at + this.view.getUint32(at, true);
    const length = this.view.getUint32(head, true);
    if (head + 4 + length * elementSize > this.view.byteLength) throw new RangeError("a vector beyond its buffer");
    return { start: head + 4, length };
  }

  *eachTable(id: number): Generator<FlatTable> {
    const { start, length } = this.vector(id, 4);
    for (let at = start; at < start + 4 * length; at += 4) yield new FlatTable(this.view, at + this.view.getUint32(at, true));
  }

  bytes(id: number): Uint8Array {
    const { start, length } = this.vector(id, 1);
    return new Uint8Array(this.view.buffer, this.view.byteOffset + start, length);
  }
}

/** Exact up to 2^53, and too large or too small beyond: callers compare with bounds below that. */
export function readI64(view: DataView, at: number): number {
  return view.getInt32(at + 4, true) * 2 ** 32 + view.getUint32(at, true);
}
