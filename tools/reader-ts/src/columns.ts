/** The columns of SPEC 11.1 as typed arrays, once their types, lengths, offsets and nulls have been checked. */
import { type ArrowArray, ArrowType, badManifest } from "./arrow.js";

export interface Lists {
  /** Entry of row r lie in [offsets[r], offsets[r + 1]) of the child. */
  readonly offsets: Int32Array;
  readonly child: ArrowArray;
}

/** DF-MAN-01: found by name, once. */
export function column(columns: readonly ArrowArray[], name: string): ArrowArray {
  const found = columns.filter((c) => c.field.name === name);
  if (found.length !== 1) badManifest(`column ${name} occurs ${found.length} times`);
  return found[0];
}

function wrongType(array: ArrowArray): never {
  return badManifest(`column ${array.field.name} has another type`);
}

function noNulls(array: ArrowArray): void {
  if (array.nullCount !== 0) badManifest("a column has nulls");
  const bits = array.buffers[0];
  if (bits.length === 0) return;
  if (bits.length < Math.ceil(array.length / 8)) badManifest("a validity buffer is too short");
  for (let i = 0; i < array.length; i++) {
    if (((bits[i >> 3] >> (i & 7)) & 1) === 0) badManifest("a column has nulls");
  }
}

/** A view of the buffer's first bytes, aligned. */
function aligned(bytes: Uint8Array, size: number): { buffer: ArrayBufferLike; at: number } {
  if (size > bytes.length) badManifest("a buffer is too short for its column");
  if (bytes.byteOffset % 8 === 0) return { buffer: bytes.buffer, at: bytes.byteOffset };
  return { buffer: bytes.slice(0, size).buffer, at: 0 };
}

function offsets(array: ArrowArray, childLength: number): Int32Array {
  if (array.length === 0) return new Int32Array(1);
  const { buffer, at } = aligned(array.buffers[1], (array.length + 1) * 4);
  const result = new Int32Array(buffer, at, array.length + 1);
  if (result[0] < 0) badManifest("offsets are not valid");
  for (let i = 1; i < result.length; i++) if (result[i] < result[i - 1]) badManifest("offsets fall");
  if (result[result.length - 1] > childLength) badManifest("offsets are not within the column");
  return result;
}

export function strings(array: ArrowArray): Uint8Array[] {
  if (array.field.typeId !== ArrowType.Utf8 || array.field.children.length !== 0) wrongType(array);
  noNulls(array);
  const data = array.buffers[2];
  const at = offsets(array, data.length);
  return Array.from({ length: array.length }, (_, i) => data.subarray(at[i], at[i + 1]));
}

export function lists(array: ArrowArray): Lists {
  if (array.field.typeId !== ArrowType.List || array.field.children.length !== 1) wrongType(array);
  noNulls(array);
  const child = array.children[0];
  noNulls(child);
  return { offsets: offsets(array, child.length), child };
}

function isInt(array: ArrowArray, bits: number, signed: boolean): boolean {
  const { typeId, parameter, signed: isSigned, children } = array.field;
  return typeId === ArrowType.Int && parameter === bits && isSigned === signed && children.length === 0;
}

export function uint8(array: ArrowArray): Uint8Array {
  if (!isInt(array, 8, false)) wrongType(array);
  const { buffer, at } = aligned(array.buffers[1], array.length);
  return new Uint8Array(buffer, at, array.length);
}

export function uint32(array: ArrowArray): Uint32Array {
  if (!isInt(array, 32, false)) wrongType(array);
  const { buffer, at } = aligned(array.buffers[1], array.length * 4);
  return new Uint32Array(buffer, at, array.length);
}

/** Low and high halves in turn: int64 without BigInt. */
export function int64Halves(array: ArrowArray): Uint32Array {
  if (!isInt(array, 64, true)) wrongType(array);
  const { buffer, at } = aligned(array.buffers[1], array.length * 8);
  return new Uint32Array(buffer, at, array.length * 2);
}

/** Exact up to 2^53; beyond it only the sign and the size are right. */
export function int64At(halves: Uint32Array, i: number): number {
  return (halves[2 * i + 1] | 0) * 2 ** 32 + halves[2 * i];
}

export function fixedBinary(array: ArrowArray, width: number): Uint8Array {
  const { typeId, parameter, children } = array.field;
  if (typeId !== ArrowType.FixedSizeBinary || parameter !== width || children.length !== 0) wrongType(array);
  const { buffer, at } = aligned(array.buffers[1], array.length * width);
  return new Uint8Array(buffer, at, array.length * width);
}
