/** Fetches pieces by byte range, in as few requests as their places allow (SPEC 13, step 5). */
import { DeltaformatError, fail, isError } from "./errors.js";
import type { PackEntry } from "./manifestMeta.js";

export interface Piece {
  readonly pack: PackEntry;
  readonly offset: number;
  readonly length: number;
}

/** Bytes between two ranges that are fetched along rather than asked for apart (DF-RD-01 allows it). */
const MAX_GAP = 16 * 1024;
const MAX_REQUEST = 16 * 1024 * 1024;
const PARALLEL = 6;

export type RangeReader = (pack: PackEntry, start: number, end: number) => Promise<Uint8Array>;

/** The pieces' bytes in their order; where a range could not be read, the error in its place. */
export async function fetchPieces(pieces: readonly Piece[], read: RangeReader): Promise<(Uint8Array | DeltaformatError)[]> {
  const order = pieces.map((_, i) => i).sort((a, b) => {
    const x = pieces[a];
    const y = pieces[b];
    if (x.pack.source !== y.pack.source) return x.pack.source < y.pack.source ? -1 : 1;
    return x.offset - y.offset || x.length - y.length;
  });
  const result = new Array<Uint8Array | DeltaformatError>(pieces.length);
  await forEachLimited(runs(pieces, order), PARALLEL, async (run) => {
    const pack = pieces[run.items[0]].pack;
    let bytes: Uint8Array | DeltaformatError;
    try {
      bytes = await read(pack, run.start, run.end);
    } catch (e) {
      if (!isError(e)) throw e;
      bytes = e;
    }
    for (const i of run.items) {
      const at = pieces[i].offset - run.start;
      result[i] = bytes instanceof DeltaformatError ? bytes : bytes.subarray(at, at + pieces[i].length);
    }
  });
  return result;
}

interface Run {
  readonly items: number[];
  readonly start: number;
  end: number;
}

function runs(pieces: readonly Piece[], order: readonly number[]): Run[] {
  const result: Run[] = [];
  let run: Run | undefined;
  for (const i of order) {
    const { pack, offset, length } = pieces[i];
    const end = offset + length;
    const joins = run !== undefined && pieces[run.items[0]].pack.source === pack.source
      && offset <= run.end + MAX_GAP && Math.max(end, run.end) - run.start <= MAX_REQUEST;
    if (joins && run !== undefined) {
      run.items.push(i);
      run.end = Math.max(run.end, end);
    } else {
      run = { items: [i], start: offset, end };
      result.push(run);
    }
  }
  return result;
}

export async function forEachLimited<T>(items: readonly T[], limit: number, work: (item: T, i: number) => Promise<void>): Promise<void> {
  let next = 0;
  const worker = async (): Promise<void> => {
    while (next < items.length) {
      const i = next++;
      await work(items[i], i);
    }
  };
  await Promise.all(Array.from({ length: Math.min(limit, items.length) }, worker));
}

export function exactly(bytes: Uint8Array | null, length: number, key: string): Uint8Array {
  if (bytes === null) fail("object-missing", `${key} is missing`);
  if (bytes.length !== length) fail("size-mismatch", `${key} does not have its stated size`);
  return bytes;
}
