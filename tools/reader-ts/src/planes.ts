import { fail } from "./errors.js";
import { badPayload, type PayloadReader } from "./stream.js";

/** The width of a payload's first byte; the block must be a whole number of such elements (DF-ENC-07). */
export function readWidth(head: number, blockLength: number): number {
  const width = 1 << (head & 3);
  if (blockLength % width !== 0) badPayload(`a block of ${blockLength} bytes has no elements of ${width}`);
  return width;
}

/** SPEC 9.2. With a base the planes hold differences, without one the elements themselves. */
export function decodePlanes(payload: PayloadReader, blockLength: number, base: Uint8Array | null): Uint8Array {
  const head = payload.byte();
  if ((head & 0xfc) !== 0) fail("encoding-unknown", "reserved bits of a planes payload are set"); // DF-ENC-06
  const width = readWidth(head, blockLength);
  const n = blockLength / width;
  const planes: Uint8Array[] = [];
  for (let j = 0; j < width; j++) planes.push(payload.stream(n));
  payload.finish();
  const out = new Uint8Array(blockLength);
  if (base === null) interleave(planes, out);
  else addPlanes(planes, base, out);
  return out;
}

function interleave(planes: readonly Uint8Array[], out: Uint8Array): void {
  const width = planes.length;
  planes.forEach((plane, j) => {
    for (let i = 0, at = j; i < plane.length; i++, at += width) out[at] = plane[i];
  });
}

/** Addition modulo 2^(8w), byte by byte with a carry: the same for every width. */
function addPlanes(planes: readonly Uint8Array[], base: Uint8Array, out: Uint8Array): void {
  const width = planes.length;
  const n = planes[0].length;
  for (let i = 0, at = 0; i < n; i++) {
    let carry = 0;
    for (let j = 0; j < width; j++, at++) {
      carry += base[at] + planes[j][i];
      out[at] = carry;
      carry >>= 8;
    }
  }
}
