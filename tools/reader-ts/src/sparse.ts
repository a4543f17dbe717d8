import { fail } from "./errors.js";
import { readWidth } from "./planes.js";
import { badPayload, type PayloadReader } from "./stream.js";
import { Strata } from "./strata.js";

/** SPEC 9.3. `base` is not changed: every position is known and checked before an element changes (DF-ENC-17). */
export function decodeSparse(payload: PayloadReader, base: Uint8Array): Uint8Array {
  const head = payload.byte();
  if ((head & 0xc0) !== 0) fail("encoding-unknown", "reserved bits of a sparse payload are set"); // DF-ENC-06
  const width = readWidth(head, base.length);
  const n = base.length / width;
  const m = (head >> 2) & 15;
  const strata = new Strata(width, m, payload.take(m * width));
  const counts: number[] = [];
  for (let i = 0; i <= m; i++) counts.push(payload.varint());
  const c = counts.reduce((sum, count) => sum + count, 0);
  if (c < 1 || c > n) badPayload(`${c} changes in ${n} elements`); // DF-ENC-11
  const ks = counts.map((count) => (count > 0 ? payload.byte() : 0));
  if (ks.some((k) => k > 26)) badPayload("k is above 26"); // DF-ENC-12

  const ranks = readRanks(payload, counts, ks, c, n);
  const signs = payload.stream(Math.ceil(c / 8));
  if (c % 8 !== 0 && signs[signs.length - 1] >> (c % 8) !== 0) badPayload("padding of the signs is not zero"); // DF-ENC-14
  const planes: Uint8Array[] = [];
  for (let j = 0; j < width; j++) planes.push(payload.stream(c));
  payload.finish();
  checkMagnitudes(planes, signs, c);

  const positions = strata.positions(base, ranks, counts);
  const out = base.slice();
  apply(out, positions, planes, signs);
  return out;
}

/** Quotients, escapes and low bits: the ranks of the changed positions in their strata, each below n. */
function readRanks(payload: PayloadReader, counts: number[], ks: number[], c: number, n: number): Uint32Array {
  const quotients = payload.stream(c);
  let escaped = 0;
  for (const q of quotients) if (q === 255) escaped++;
  const escapes = payload.stream(4 * escaped);
  const lowBytes = counts.reduce((sum, count, i) => sum + Math.ceil((count * ks[i]) / 8), 0);
  const low = payload.stream(lowBytes);

  const ranks = new Uint32Array(c);
  let item = 0;
  let escapeAt = 0;
  let lowBase = 0;
  for (let i = 0; i < counts.length; i++) {
    const k = ks[i];
    const scale = 2 ** k;
    let bit = lowBase * 8;
    let rank = -1;
    for (let j = 0; j < counts[i]; j++, item++) {
      let quotient = quotients[item];
      if (quotient === 255) {
        quotient = u32(escapes, escapeAt);
        escapeAt += 4;
        if (quotient < 255) badPayload("an escape below 255"); // DF-ENC-13
      }
      // Up to 2^58: not exact then, but far above n.
      rank += 1 + quotient * scale + bitsAt(low, bit, k);
      if (rank >= n) badPayload("a rank beyond its stratum"); // DF-ENC-15
      bit += k;
      ranks[item] = rank;
    }
    const next = lowBase + Math.ceil((counts[i] * k) / 8);
    if (bit % 8 !== 0 && low[next - 1] >> (bit % 8) !== 0) badPayload("padding of the low bits is not zero"); // DF-ENC-14
    lowBase = next;
  }
  return ranks;
}

function u32(bytes: Uint8Array, at: number): number {
  return (bytes[at] | (bytes[at + 1] << 8) | (bytes[at + 2] << 16) | (bytes[at + 3] << 24)) >>> 0;
}

/** k ≤ 26 bits from a bit position; with the shift they can reach into a fifth byte. */
function bitsAt(bytes: Uint8Array, bit: number, k: number): number {
  if (k === 0) return 0;
  const at = Math.floor(bit / 8);
  const shift = bit % 8;
  let value = u32(bytes, at) >>> shift; // bytes past the end read as 0
  if (shift + k > 32) value |= bytes[at + 4] << (32 - shift);
  return value & (2 ** k - 1);
}

/** DF-ENC-16: the top bit of |d| - 1 is clear, and where d is positive it is not M either. */
function checkMagnitudes(planes: readonly Uint8Array[], signs: Uint8Array, c: number): void {
  const top = planes[planes.length - 1];
  for (let i = 0; i < c; i++) {
    if (top[i] < 0x7f) continue;
    if (top[i] > 0x7f) badPayload("a difference is too large");
    if (((signs[i >> 3] >> (i & 7)) & 1) === 1) continue;
    let j = planes.length - 2;
    while (j >= 0 && planes[j][i] === 0xff) j--;
    if (j < 0) badPayload("a difference is too large");
  }
}

/** Adds |d|, or subtracts it, modulo 2^(8w): |d| - 1 with a carry (or borrow) of 1 to begin with. */
function apply(out: Uint8Array, positions: Uint32Array, planes: readonly Uint8Array[], signs: Uint8Array): void {
  const width = planes.length;
  for (let i = 0; i < positions.length; i++) {
    const at = positions[i] * width;
    if (((signs[i >> 3] >> (i & 7)) & 1) === 0) {
      let carry = 1;
      for (let j = 0; j < width; j++) {
        carry += out[at + j] + planes[j][i];
        out[at + j] = carry;
        carry >>= 8;
      }
    } else {
      let carry = -1;
      for (let j = 0; j < width; j++) {
        carry += out[at + j] - planes[j][i];
        out[at + j] = carry;
        carry >>= 8;
      }
    }
  }
}
