/** Decoding tables of zstd: FSE (RFC 8878, 4.1) and Huffman (4.2). */

/** A frame whose content is not valid. The caller turns it into the error of SPEC 17. */
export class FrameCorrupt extends Error {}

export function corrupt(message: string): never {
  throw new FrameCorrupt(message);
}

/** Bits read backwards: `left` of them remain, the next ones lie below that position. */
export class BackwardBits {
  left: number;

  constructor(private readonly data: Uint8Array, private readonly start: number, end: number) {
    if (end <= start || data[end - 1] === 0) corrupt("a bit stream has no end mark");
    this.left = (end - start) * 8 - 1 - Math.clz32(data[end - 1]) + 24;
  }

  /** The next n ≤ 16 bits; below the beginning there are zeros. */
  peek(n: number): number {
    const from = this.left - n;
    if (from >= 0) return this.at(from) & ((1 << n) - 1);
    if (this.left <= 0) return 0;
    return (this.at(0) & ((1 << this.left) - 1)) << -from;
  }

  read(n: number): number {
    const value = this.peek(n);
    this.left -= n;
    return value;
  }

  /** Up to 32 bits. */
  readLong(n: number): number {
    if (n <= 16) return this.read(n);
    const high = this.read(n - 16);
    return high * 65536 + this.read(16);
  }

  private at(bit: number): number {
    const i = this.start + (bit >> 3);
    const d = this.data;
    return (d[i] | (d[i + 1] << 8) | (d[i + 2] << 16)) >>> (bit & 7);
  }
}

export interface FseTable {
  readonly log: number;
  readonly symbol: Uint8Array;
  readonly bits: Uint8Array;
  readonly base: Uint16Array;
}

export function rleTable(symbol: number): FseTable {
  return { log: 0, symbol: Uint8Array.of(symbol), bits: new Uint8Array(1), base: new Uint16Array(1) };
}

export function buildFse(counts: ArrayLike<number>, log: number): FseTable {
  const size = 1 << log;
  const symbol = new Uint8Array(size);
  const bits = new Uint8Array(size);
  const base = new Uint16Array(size);
  const next = new Uint16Array(counts.length);
  let high = size;
  for (let s = 0; s < counts.length; s++) {
    if (counts[s] === -1) {
      symbol[--high] = s;
      next[s] = 1;
    } else {
      next[s] = counts[s];
    }
  }
  const step = (size >> 1) + (size >> 3) + 3;
  let at = 0;
  for (let s = 0; s < counts.length; s++) {
    for (let i = 0; i < counts[s]; i++) {
      symbol[at] = s;
      do at = (at + step) & (size - 1);
      while (at >= high);
    }
  }
  for (let i = 0; i < size; i++) {
    const n = next[symbol[i]]++;
    bits[i] = log - (31 - Math.clz32(n));
    base[i] = (n << bits[i]) - size;
  }
  return { log, symbol, bits, base };
}

/** An FSE table description from `at`, and where it ends. */
export function readFse(
  data: Uint8Array, at: number, end: number, maxLog: number, maxSymbol: number,
): { table: FseTable; end: number } {
  let bit = at * 8;
  const read = (n: number): number => {
    const i = bit >> 3;
    const v = (data[i] | (data[i + 1] << 8) | (data[i + 2] << 16)) >>> (bit & 7);
    bit += n;
    return v & ((1 << n) - 1);
  };
  const log = read(4) + 5;
  if (log > maxLog) corrupt("an FSE table is too large");
  const counts: number[] = [];
  let remaining = (1 << log) + 1;
  while (remaining > 1) {
    if (counts.length > maxSymbol || bit > end * 8) corrupt("an FSE table has too many symbols");
    const bits = 32 - Math.clz32(remaining);
    const short = (1 << bits) - 1 - remaining;
    let value = read(bits - 1);
    if (value >= short) {
      bit -= bits - 1;
      value = read(bits);
      if (value >= 1 << (bits - 1)) value -= short;
    }
    const count = value - 1;
    remaining -= count < 0 ? 1 : count;
    counts.push(count);
    if (count === 0) {
      for (let repeat = 3; repeat === 3; ) {
        repeat = read(2);
        for (let i = 0; i < repeat; i++) counts.push(0);
        if (counts.length > maxSymbol + 1) corrupt("an FSE table has too many symbols");
      }
    }
  }
  const after = (bit + 7) >> 3;
  if (remaining !== 1 || counts.length > maxSymbol + 1 || after > end) corrupt("an FSE table is not valid");
  return { table: buildFse(counts, log), end: after };
}

export interface HuffmanTable {
  readonly log: number;
  /** The symbol in the low byte, its number of bits above. */
  readonly entry: Uint16Array;
}

function fseWeights(data: Uint8Array, at: number, end: number): number[] {
  const { table, end: begin } = readFse(data, at, end, 6, 255);
  const stream = new BackwardBits(data, begin, end);
  const weights: number[] = [];
  const state = [stream.read(table.log), stream.read(table.log)];
  if (stream.left < 0) corrupt("Huffman weights are cut short");
  for (let turn = 0; ; turn ^= 1) {
    weights.push(table.symbol[state[turn]]);
    if (weights.length > 254) corrupt("too many Huffman weights");
    const bits = table.bits[state[turn]];
    if (bits > stream.left) {
      weights.push(table.symbol[state[turn ^ 1]]);
      return weights;
    }
    state[turn] = table.base[state[turn]] + stream.read(bits);
  }
}

/** A Huffman tree description from `at`, and where it ends. */
export function readHuffman(data: Uint8Array, at: number, limit: number): { table: HuffmanTable; end: number } {
  if (at >= limit) corrupt("a Huffman table is cut short");
  const head = data[at++];
  let weights: number[];
  let end: number;
  if (head < 128) {
    end = at + head;
    if (end > limit) corrupt("a Huffman table is cut short");
    weights = fseWeights(data, at, end);
  } else {
    const n = head - 127;
    end = at + ((n + 1) >> 1);
    if (end > limit) corrupt("a Huffman table is cut short");
    weights = Array.from({ length: n }, (_, i) => (i & 1 ? data[at + (i >> 1)] & 15 : data[at + (i >> 1)] >> 4));
  }
  let sum = 0;
  for (const w of weights) {
    if (w > 11) corrupt("a Huffman weight is too large");
    if (w > 0) sum += 1 << (w - 1);
  }
  if (sum === 0) corrupt("a Huffman table without symbols");
  const log = 32 - Math.clz32(sum);
  const rest = (1 << log) - sum;
  if (log > 11 || (rest & (rest - 1)) !== 0) corrupt("Huffman weights do not add up");
  weights.push(32 - Math.clz32(rest));
  if (weights.filter((w) => w === 1).length < 2) corrupt("Huffman weights do not add up");
  return { table: buildHuffman(weights, log), end };
}

function buildHuffman(weights: readonly number[], log: number): HuffmanTable {
  const entry = new Uint16Array(1 << log);
  let at = 0;
  for (let w = 1; w <= log; w++) {
    for (let s = 0; s < weights.length; s++) {
      if (weights[s] !== w) continue;
      const span = 1 << (w - 1);
      entry.fill(s | ((log + 1 - w) << 8), at, at + span);
      at += span;
    }
  }
  return { log, entry };
}
