/** The root of a version (SPEC 7.1, DF-DIG-03). */
import type { Descriptor } from "./descriptor.js";
import { type Hashes, hex } from "./hash.js";
import type { Tensor } from "./manifest.js";

const ENCODER = new TextEncoder();
const LEAF = ENCODER.encode("deltaformat/1 tensor\0");
const ROOT = ENCODER.encode("deltaformat/1 root\0");

function u64(value: number): Uint8Array {
  const bytes = new Uint8Array(8);
  const view = new DataView(bytes.buffer);
  view.setUint32(0, value % 2 ** 32, true);
  view.setUint32(4, Math.floor(value / 2 ** 32), true);
  return bytes;
}

function leaf(tensor: Tensor, hashes: Hashes): Uint8Array {
  const { part, nameBytes, dtype, dims, blocks, firstBlock } = tensor;
  const head = new Uint8Array(4 + 1 + dtype.length + 1 + dims.length * 4);
  const view = new DataView(head.buffer);
  view.setUint32(0, nameBytes.length, true);
  head[4] = dtype.length;
  ENCODER.encodeInto(dtype, head.subarray(5));
  const at = 5 + dtype.length;
  head[at] = dims.length / 2;
  for (let i = 0; i < dims.length; i++) view.setUint32(at + 1 + 4 * i, dims[i], true);
  const digests = part.digest.subarray(firstBlock * part.digestBytes, (firstBlock + blocks) * part.digestBytes);
  return hashes.sha256(LEAF, head.subarray(0, 4), nameBytes, head.subarray(4), u64(blocks), digests);
}

/** `tensors` in the order of their names as UTF-8 byte strings. */
export function computeRoot(tensors: readonly Tensor[], descriptor: Descriptor, hashes: Hashes): string {
  const { digest, blockBytes } = descriptor;
  const leaves = new Uint8Array(32 * tensors.length);
  tensors.forEach((tensor, i) => leaves.set(leaf(tensor, hashes), 32 * i));
  const root = hashes.sha256(
    ROOT, Uint8Array.of(digest.name.length), ENCODER.encode(digest.name), u64(blockBytes), u64(tensors.length), leaves,
  );
  return `df1:${digest.name}:${blockBytes}:${hex(root)}`;
}

export function compareBytes(a: Uint8Array, b: Uint8Array): number {
  const n = Math.min(a.length, b.length);
  for (let i = 0; i < n; i++) if (a[i] !== b[i]) return a[i] - b[i];
  return a.length - b.length;
}
