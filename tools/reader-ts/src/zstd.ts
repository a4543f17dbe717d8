/**
 * The content of one zstd frame (RFC 8878), written into memory of exactly the stated size. Strict: every bit stream must
 * end where it should, and no sequence can write or loop past the content (DF-SEC-01).
 */
import { fail } from "./errors.js";
import type { Hashes } from "./hash.js";
import type { FrameHeader } from "./zstdHeader.js";
import {
  BackwardBits, buildFse, corrupt, FrameCorrupt, type FseTable, type HuffmanTable, readFse, readHuffman, rleTable,
} from "./zstdTables.js";

const BLOCK_MAX = 128 * 1024;

const LL_BITS = [...new Array<number>(16).fill(0), 1, 1, 1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16];
const ML_BITS = [
  ...new Array<number>(32).fill(0), 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16,
];
const LL_BASE = baselines(LL_BITS, 0);
const ML_BASE = baselines(ML_BITS, 3);

function baselines(bits: readonly number[], first: number): number[] {
  let next = first;
  return bits.map((b) => {
    const base = next;
    next += 2 ** b;
    return base;
  });
}

const LL_DEFAULT = buildFse([
  4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1,
], 6);
const ML_DEFAULT = buildFse([
  1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
  1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1,
], 6);
const OF_DEFAULT = buildFse([
  1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1,
], 5);

/** Which table is read, and its bounds: literal lengths, offsets, match lengths. */
const KINDS = [
  { default: LL_DEFAULT, maxLog: 9, maxSymbol: 35 },
  { default: OF_DEFAULT, maxLog: 8, maxSymbol: 31 },
  { default: ML_DEFAULT, maxLog: 9, maxSymbol: 52 },
] as const;

class Decoder {
  private written = 0;
  private huffman: HuffmanTable | undefined;
  private tables: (FseTable | undefined)[] = [undefined, undefined, undefined];
  private readonly repeats = [1, 4, 8];
  private readonly blockMax: number;
  private readonly scratch: Uint8Array;

  constructor(private readonly src: Uint8Array, private readonly out: Uint8Array, private readonly header: FrameHeader) {
    this.blockMax = Math.min(header.windowSize, BLOCK_MAX);
    this.scratch = new Uint8Array(this.blockMax);
  }

  run(): void {
    let at = this.header.blocks;
    for (let last = false; !last; ) {
      const head = this.src[at] | (this.src[at + 1] << 8) | (this.src[at + 2] << 16);
      at += 3;
      last = (head & 1) !== 0;
      const size = head >>> 3;
      if (size > this.blockMax) corrupt("a block is too large");
      switch ((head >> 1) & 3) {
        case 0:
          this.room(size);
          this.out.set(this.src.subarray(at, at + size), this.written);
          this.written += size;
          at += size;
          break;
        case 1:
          this.room(size);
          this.out.fill(this.src[at], this.written, this.written + size);
          this.written += size;
          at += 1;
          break;
        case 2:
          this.compressed(at, at + size);
          at += size;
          break;
        default:
          corrupt("a reserved block type");
      }
    }
    if (this.written !== this.out.length) corrupt("the content is shorter than stated");
  }

  private room(n: number): void {
    if (n > this.out.length - this.written) corrupt("the content is longer than stated");
  }

  private compressed(start: number, end: number): void {
    const begin = this.written;
    const { literals, next } = this.literals(start, end);
    this.sequences(next, end, literals, begin);
  }

  /** RFC 8878, 3.1.1.3.1 */
  private literals(start: number, end: number): { literals: Uint8Array; next: number } {
    const src = this.src;
    if (start >= end) corrupt("a block is cut short");
    const type = src[start] & 3;
    const format = (src[start] >> 2) & 3;
    const need = (n: number): void => {
      if (n > end) corrupt("a block is cut short");
    };
    if (type < 2) {
      const head = format === 1 ? 2 : format === 3 ? 3 : 1;
      need(start + head);
      const size = head === 1 ? src[start] >> 3
        : head === 2 ? (src[start] >> 4) | (src[start + 1] << 4)
        : (src[start] >> 4) | (src[start + 1] << 4) | (src[start + 2] << 12);
      if (size > this.blockMax) corrupt("too many literals");
      const at = start + head;
      if (type === 0) {
        need(at + size);
        return { literals: src.subarray(at, at + size), next: at + size };
      }
      need(at + 1);
      return { literals: this.scratch.subarray(0, size).fill(src[at]), next: at + 1 };
    }
    const head = format < 2 ? 3 : format + 2;
    const bits = format < 2 ? 10 : format === 2 ? 14 : 18;
    need(start + head);
    let sizes = 0;
    for (let i = head - 1; i >= 0; i--) sizes = sizes * 256 + src[start + i];
    sizes = Math.floor(sizes / 16);
    const size = sizes % 2 ** bits;
    const packed = Math.floor(sizes / 2 ** bits);
    let at = start + head;
    const next = at + packed;
    need(next);
    if (size > this.blockMax) corrupt("too many literals");
    if (type === 2) {
      const read = readHuffman(src, at, next);
      this.huffman = read.table;
      at = read.end;
    }
    if (this.huffman === undefined) corrupt("literals without a Huffman table");
    const literals = this.scratch.subarray(0, size);
    if (format === 0) huffmanStream(src, at, next, literals, this.huffman);
    else huffmanStreams(src, at, next, literals, this.huffman);
    return { literals, next };
  }

  private table(kind: number, mode: number, at: number, end: number): number {
    const { maxLog, maxSymbol } = KINDS[kind];
    switch (mode) {
      case 0:
        this.tables[kind] = KINDS[kind].default;
        return at;
      case 1:
        if (at >= end || this.src[at] > maxSymbol) corrupt("a symbol that does not exist");
        this.tables[kind] = rleTable(this.src[at]);
        return at + 1;
      case 2: {
        const read = readFse(this.src, at, end, maxLog, maxSymbol);
        this.tables[kind] = read.table;
        return read.end;
      }
      default:
        if (this.tables[kind] === undefined) corrupt("a table to repeat is missing");
        return at;
    }
  }

  /** RFC 8878, 3.1.1.3.2 and 3.1.1.4 */
  private sequences(start: number, end: number, literals: Uint8Array, begin: number): void {
    const src = this.src;
    let at = start;
    if (at >= end) corrupt("a block is cut short");
    let count = src[at++];
    if (count >= 128) {
      const bytes = count === 255 ? 2 : 1;
      if (at + bytes > end) corrupt("a block is cut short");
      count = count === 255 ? src[at] + (src[at + 1] << 8) + 0x7f00 : ((count - 128) << 8) + src[at];
      at += bytes;
    }
    let taken = 0;
    if (count === 0) {
      if (at !== end) corrupt("bytes left over in a block");
    } else {
      if (at >= end) corrupt("a block is cut short");
      const modes = src[at++];
      if ((modes & 3) !== 0) corrupt("reserved bits of a block are set");
      at = this.table(0, modes >> 6, at, end);
      at = this.table(1, (modes >> 4) & 3, at, end);
      at = this.table(2, (modes >> 2) & 3, at, end);
      taken = this.execute(new BackwardBits(src, at, end), count, literals, begin);
    }
    const rest = literals.length - taken;
    this.room(rest);
    if (this.written + rest - begin > this.blockMax) corrupt("a block is too large");
    this.out.set(literals.subarray(taken), this.written);
    this.written += rest;
  }

  /** Carries out the sequences; returns the number of literals used. */
  private execute(stream: BackwardBits, count: number, literals: Uint8Array, begin: number): number {
    const [ll, of, ml] = this.tables as [FseTable, FseTable, FseTable];
    let llState = stream.read(ll.log);
    let ofState = stream.read(of.log);
    let mlState = stream.read(ml.log);
    let taken = 0;
    for (let i = 0; i < count; i++) {
      const ofCode = of.symbol[ofState];
      const mlCode = ml.symbol[mlState];
      const llCode = ll.symbol[llState];
      const offsetValue = 2 ** ofCode + stream.readLong(ofCode);
      const matchLength = ML_BASE[mlCode] + stream.read(ML_BITS[mlCode]);
      const literalLength = LL_BASE[llCode] + stream.read(LL_BITS[llCode]);
      if (i < count - 1) {
        llState = ll.base[llState] + stream.read(ll.bits[llState]);
        mlState = ml.base[mlState] + stream.read(ml.bits[mlState]);
        ofState = of.base[ofState] + stream.read(of.bits[ofState]);
      }
      if (stream.left < 0) corrupt("sequences are cut short");
      const offset = this.offset(offsetValue, literalLength === 0);
      if (literalLength > literals.length - taken) corrupt("more literals used than there are");
      this.room(literalLength + matchLength);
      if (this.written + literalLength + matchLength - begin > this.blockMax) corrupt("a block is too large");
      this.copyLiterals(literals, taken, literalLength);
      taken += literalLength;
      if (offset > this.written || offset < 1) corrupt("a match before the beginning");
      this.copyMatch(offset, matchLength);
    }
    if (stream.left !== 0) corrupt("bits left over after the sequences");
    return taken;
  }

  private offset(value: number, noLiterals: boolean): number {
    const r = this.repeats;
    if (value > 3) {
      r[2] = r[1];
      r[1] = r[0];
      r[0] = value - 3;
      return r[0];
    }
    const index = value - 1 + (noLiterals ? 1 : 0);
    if (index === 0) return r[0];
    const offset = index < 3 ? r[index] : r[0] - 1;
    if (index > 1) r[2] = r[1];
    r[1] = r[0];
    r[0] = offset;
    return offset;
  }

  private copyLiterals(literals: Uint8Array, from: number, n: number): void {
    const out = this.out;
    const to = this.written;
    if (n > 32) out.set(literals.subarray(from, from + n), to);
    else for (let i = 0; i < n; i++) out[to + i] = literals[from + i];
    this.written = to + n;
  }

  private copyMatch(offset: number, n: number): void {
    const out = this.out;
    const to = this.written;
    const from = to - offset;
    if (n > 32 && offset >= n) out.copyWithin(to, from, from + n);
    else for (let i = 0; i < n; i++) out[to + i] = out[from + i];
    this.written = to + n;
  }
}

function huffmanStream(src: Uint8Array, start: number, end: number, out: Uint8Array, table: HuffmanTable): void {
  const stream = new BackwardBits(src, start, end);
  const { log, entry } = table;
  const mask = (1 << log) - 1;
  const n = out.length;
  let left = stream.left;
  let i = 0;
  // Two symbols, of at most 11 bits each, from one look at the next 24 bits.
  while (i + 2 <= n && left >= 32) {
    const from = left - 24;
    const at = start + (from >> 3);
    const bits = (src[at] | (src[at + 1] << 8) | (src[at + 2] << 16) | (src[at + 3] << 24)) >>> (from & 7);
    const first = entry[(bits >>> (24 - log)) & mask];
    const used = first >> 8;
    const second = entry[(bits >>> (24 - log - used)) & mask];
    out[i++] = first;
    out[i++] = second;
    left -= used + (second >> 8);
  }
  stream.left = left;
  for (; i < n; i++) {
    const found = entry[stream.peek(log)];
    out[i] = found;
    stream.left -= found >> 8;
  }
  if (stream.left !== 0) corrupt("a Huffman stream does not end where it should");
}

function huffmanStreams(src: Uint8Array, start: number, end: number, out: Uint8Array, table: HuffmanTable): void {
  if (start + 6 > end || out.length < 6) corrupt("four Huffman streams are cut short");
  const quarter = (out.length + 3) >> 2;
  let at = start + 6;
  for (let i = 0; i < 4; i++) {
    const next = i === 3 ? end : at + (src[start + 2 * i] | (src[start + 2 * i + 1] << 8));
    if (next > end || i * quarter > out.length) corrupt("four Huffman streams are cut short");
    huffmanStream(src, at, next, out.subarray(i * quarter, Math.min((i + 1) * quarter, out.length)), table);
    at = next;
  }
}

/** `frame` is exactly one frame whose header has been checked and whose end has been found. */
export function decompressFrame(frame: Uint8Array, header: FrameHeader, hashes: Hashes): Uint8Array {
  const out = new Uint8Array(header.contentSize);
  try {
    new Decoder(frame, out, header).run();
  } catch (e) {
    if (e instanceof FrameCorrupt) fail("frame-corrupt", `a zstd frame does not decompress: ${e.message}`);
    throw e;
  }
  if (header.hasChecksum) {
    const at = frame.length - 4;
    const stated = (frame[at] | (frame[at + 1] << 8) | (frame[at + 2] << 16) | (frame[at + 3] << 24)) >>> 0;
    if (stated !== hashes.zstdChecksum(out)) fail("frame-corrupt", "a zstd frame has a wrong checksum");
  }
  return out;
}
