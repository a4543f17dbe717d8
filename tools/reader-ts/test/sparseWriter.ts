/** A plain writer of sparse payloads, straight from the definitions of SPEC 9.3, with BigInt. */

export interface SparseChoice {
  width: number;
  thresholds: bigint[];
  /** Per stratum. */
  ks: number[];
}

export function varint(value: number): number[] {
  const bytes = [];
  for (; value >= 128; value = Math.floor(value / 128)) bytes.push((value % 128) | 128);
  return [...bytes, value];
}

export function stored(bytes: readonly number[]): number[] {
  return bytes.length === 0 ? [] : [0, ...bytes];
}

export function elements(bytes: Uint8Array, width: number): bigint[] {
  return Array.from({ length: bytes.length / width }, (_, i) => {
    let value = 0n;
    for (let j = width - 1; j >= 0; j--) value = (value << 8n) | BigInt(bytes[i * width + j]);
    return value;
  });
}

function packBits(values: readonly { value: number; bits: number }[]): number[] {
  const bits = values.flatMap(({ value, bits: n }) => Array.from({ length: n }, (_, i) => Math.floor(value / 2 ** i) % 2));
  const bytes = new Array<number>(Math.ceil(bits.length / 8)).fill(0);
  bits.forEach((bit, i) => (bytes[i >> 3] |= bit << (i & 7)));
  return bytes;
}

export function writeSparse(base: Uint8Array, next: Uint8Array, { width, thresholds, ks }: SparseChoice): Uint8Array {
  const modulus = 1n << BigInt(8 * width);
  const maximum = modulus / 2n - 1n;
  const old = elements(base, width);
  const neu = elements(next, width);
  const m = thresholds.length;
  const stratumOf = old.map((x) => thresholds.filter((t) => (x & maximum) < t).length);
  const population = new Array<number>(m + 1).fill(0);
  const changes: { rank: number; d: bigint }[][] = population.map(() => []);
  old.forEach((x, p) => {
    const rank = population[stratumOf[p]]++;
    let d = (neu[p] - x + modulus) % modulus;
    if (d > maximum) d -= modulus;
    if (d !== 0n) changes[stratumOf[p]].push({ rank, d });
  });
  const out = [Math.log2(width) | (m << 2)];
  const le = (value: bigint): number[] => Array.from({ length: width }, (_, j) => Number((value >> BigInt(8 * j)) & 255n));
  for (const t of thresholds) out.push(...le(t));
  for (const list of changes) out.push(...varint(list.length));
  changes.forEach((list, i) => list.length > 0 && out.push(ks[i]));
  const quotients: number[] = [];
  const escapes: number[] = [];
  const low: number[] = [];
  changes.forEach((list, i) => {
    let last = -1;
    const lows = list.map(({ rank }) => {
      const gap = rank - last - 1;
      last = rank;
      const q = Math.floor(gap / 2 ** ks[i]);
      quotients.push(Math.min(q, 255));
      if (q >= 255) escapes.push(q & 255, (q >> 8) & 255, (q >> 16) & 255, q >>> 24);
      return { value: gap % 2 ** ks[i], bits: ks[i] };
    });
    low.push(...packBits(lows));
  });
  const all = changes.flat();
  out.push(...stored(quotients), ...stored(escapes), ...stored(low));
  out.push(...stored(packBits(all.map(({ d }) => ({ value: d < 0n ? 1 : 0, bits: 1 })))));
  const magnitudes = all.map(({ d }) => le((d < 0n ? -d : d) - 1n));
  for (let j = 0; j < width; j++) out.push(...stored(magnitudes.map((bytes) => bytes[j])));
  return Uint8Array.from(out);
}
