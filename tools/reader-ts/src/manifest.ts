/** A manifest part: its tensors, and their blocks and pieces as typed arrays (SPEC 11). */
import { badManifest, openArrow } from "./arrow.js";
import { column, fixedBinary, int64At, int64Halves, type Lists, lists, strings, uint32, uint8 } from "./columns.js";
import { dtypeBits } from "./dtypes.js";
import { fail } from "./errors.js";
import { type Limits, MAX_CHAIN, MAX_NAME_BYTES, MAX_RANK, MAX_SAFE, within } from "./limits.js";
import { badPayload } from "./stream.js";
import { type Expected, nameOf, parseMeta, type PartMeta } from "./manifestMeta.js";

export const Encoding = { raw: 0, planes: 1, planesDelta: 2, sparse: 3 } as const;

export interface Part extends PartMeta {
  readonly digestBytes: number;
  readonly tensors: Tensor[];
  /** Per block. */
  readonly digest: Uint8Array;
  readonly fresh: Uint8Array;
  readonly depth: Uint8Array;
  /** Per block: where its pieces begin. */
  readonly firstPiece: Uint32Array;
  /** Per piece. */
  readonly pack: Uint32Array;
  readonly offset: Float64Array;
  readonly length: Uint32Array;
  readonly encoding: Uint8Array;
}

export interface Tensor {
  readonly part: Part;
  readonly name: string;
  readonly nameBytes: Uint8Array;
  readonly dtype: string;
  readonly bits: number;
  readonly shape: number[];
  /** Low and high half of each dimension, as the root needs them. */
  readonly dims: Uint32Array;
  readonly nbytes: number;
  readonly blocks: number;
  /** The tensor's first block in the part's arrays. */
  readonly firstBlock: number;
}

export function blockLength(tensor: Tensor, index: number, blockBytes: number): number {
  return Math.min(blockBytes, tensor.nbytes - index * blockBytes);
}

export function blockDigest(tensor: Tensor, index: number): Uint8Array {
  const { digest, digestBytes } = tensor.part;
  const at = (tensor.firstBlock + index) * digestBytes;
  return digest.subarray(at, at + digestBytes);
}

export function parsePart(file: Uint8Array, expected: Expected, digestBytes: number, limits: Limits): Part {
  const arrow = openArrow(file);
  const meta = parseMeta(arrow.metadata("deltaformat"), expected, limits);
  const { rows, columns } = arrow.columns(limits.columns);
  within(rows, limits.tensors, "tensors of a version");
  const names = strings(column(columns, "name"));
  const dtypes = strings(column(columns, "dtype"));
  const shape = lists(column(columns, "shape"));
  const shapes = int64Halves(shape.child);
  const digest = lists(column(columns, "digest"));
  const fresh = lists(column(columns, "fresh"));
  const depth = lists(column(columns, "depth"));
  const pack = lists(column(columns, "pack"));
  const gap = lists(column(columns, "gap"));
  const length = lists(column(columns, "length"));
  const encoding = lists(column(columns, "encoding"));

  // Flattened, lists that start where the one before ends: one index serves all columns of a kind.
  const blocks = flat(digest, rows);
  const pieces = flat(pack, rows);
  const depths = uint8(depth.child).subarray(...flat(depth, rows));
  const part: Part = {
    ...meta,
    digestBytes,
    tensors: [],
    digest: fixedBinary(digest.child, digestBytes).subarray(blocks[0] * digestBytes, blocks[1] * digestBytes),
    fresh: uint8(fresh.child).subarray(...flat(fresh, rows)),
    depth: depths,
    firstPiece: new Uint32Array(depths.length + 1),
    pack: uint32(pack.child).subarray(...pieces),
    offset: new Float64Array(pieces[1] - pieces[0]),
    length: uint32(length.child).subarray(...flat(length, rows)),
    encoding: uint8(encoding.child).subarray(...flat(encoding, rows)),
  };
  const gaps = int64Halves(gap.child);
  const gapBase = flat(gap, rows)[0];
  const perPiece = [pack, gap, length, encoding];
  const walk = new Walk(part, gaps, gapBase, expected);
  for (let r = 0; r < rows; r++) {
    const tensor = readTensor(part, expected.blockBytes, {
      name: names[r], dtype: dtypes[r], dims: shapes.subarray(2 * shape.offsets[r], 2 * shape.offsets[r + 1]), firstBlock: walk.block,
    });
    for (const list of [digest, fresh, depth]) {
      if (size(list, r) !== tensor.blocks) badManifest("a list per block has another length"); // DF-BLK-02, DF-MAN-04
    }
    const pieces = walk.pieces(tensor);
    for (const list of perPiece) {
      if (size(list, r) !== pieces) badManifest("a list per piece has another length"); // DF-MAN-04
    }
    walk.tensor(tensor);
    part.tensors.push(tensor);
  }
  part.firstPiece[walk.block] = walk.piece;
  return part;
}

function flat(list: Lists, rows: number): [number, number] {
  return [list.offsets[0], list.offsets[rows]];
}

function size(list: Lists, row: number): number {
  return list.offsets[row + 1] - list.offsets[row];
}

interface Row {
  readonly name: Uint8Array;
  readonly dtype: Uint8Array;
  readonly dims: Uint32Array;
  readonly firstBlock: number;
}

function readTensor(part: Part, blockBytes: number, row: Row): Tensor {
  if (row.name.length > MAX_NAME_BYTES) fail("value-invalid", "a tensor name is too long"); // DF-BLK-03
  const name = nameOf(row.name, "a tensor name");
  const dtype = nameOf(row.dtype, "a dtype");
  const bits = dtypeBits(dtype);
  const nbytes = tensorBytes(row.dims, bits);
  const shape = Array.from({ length: row.dims.length / 2 }, (_, i) => int64At(row.dims, i));
  const blocks = Math.ceil(nbytes / blockBytes);
  return { part, name, nameBytes: row.name, dtype, bits, shape, dims: row.dims, nbytes, blocks, firstBlock: row.firstBlock };
}

/** DF-MAN-06, DF-DTY-02. BigInt, since a product of dimensions may pass 2^53 before it is found too large. */
function tensorBytes(dims: Uint32Array, bits: number): number {
  if (dims.length / 2 > MAX_RANK) badManifest("a rank above 32");
  let elements = 1n;
  let empty = false;
  for (let i = 0; i < dims.length; i += 2) {
    if (dims[i + 1] > 0x7fffffff) badManifest("a negative dimension");
    const dim = (BigInt(dims[i + 1]) << 32n) | BigInt(dims[i]);
    if (dim === 0n) empty = true;
    else elements *= dim;
  }
  const total = elements * BigInt(bits);
  if (total > 8n * BigInt(MAX_SAFE)) badManifest("a tensor is too large");
  if (empty) return 0;
  if (total % 8n !== 0n) badManifest("a tensor is not a whole number of bytes");
  return Number(total / 8n);
}

/** Goes through blocks and pieces in row order, where each piece's offset follows from the one before in its pack. */
class Walk {
  block = 0;
  piece = 0;
  private readonly ends: Float64Array;

  constructor(
    private readonly part: Part,
    private readonly gaps: Uint32Array,
    private readonly gapBase: number,
    private readonly expected: Expected,
  ) {
    this.ends = new Float64Array(part.packs.length);
  }

  /** The number of pieces that the next tensor's depths ask for. */
  pieces(tensor: Tensor): number {
    let pieces = 0;
    for (let i = this.block; i < this.block + tensor.blocks; i++) {
      const depth = this.part.depth[i];
      if (depth < 1 || depth > MAX_CHAIN) badManifest("a depth that is not from 1 to 64"); // DF-MAN-04
      pieces += depth;
    }
    return pieces;
  }

  /** Reads the next tensor, once its lists are known to have their lengths. */
  tensor(tensor: Tensor): void {
    const { part, expected } = this;
    for (let i = 0; i < tensor.blocks; i++, this.block++) {
      const depth = part.depth[this.block];
      const fresh = part.fresh[this.block];
      if (fresh !== 255 && (fresh >= depth || expected.parent === null)) badManifest("a fresh value that cannot be"); // DF-MAN-07
      part.firstPiece[this.block] = this.piece;
      const length = blockLength(tensor, i, expected.blockBytes);
      for (let j = 0; j < depth; j++, this.piece++) this.one(j === 0, length);
    }
  }

  private one(first: boolean, blockBytes: number): void {
    const { part, piece } = this;
    const encoding = part.encoding[piece];
    if (encoding > Encoding.sparse) fail("encoding-unknown", `unknown encoding ${encoding}`); // DF-ENC-03
    const needsBase = encoding >= Encoding.planesDelta;
    if (needsBase === first) badPayload("a chain whose first piece needs a base, or a later one none"); // DF-ENC-02
    const pack = part.pack[piece];
    if (pack >= part.packs.length) badManifest("a pack that is not in the table");
    const length = part.length[piece];
    if (length < 1 || length > 2 * blockBytes + 4096) badManifest("a piece of a length that cannot be"); // DF-PCK-04
    if (encoding === Encoding.raw && length !== blockBytes) badPayload("a raw piece of another length than its block"); // DF-ENC-04
    // DF-MAN-03. A gap beyond 2^53 is not exact, but then out of every pack's range.
    const offset = this.ends[pack] + int64At(this.gaps, this.gapBase + piece);
    const end = offset + length;
    if (offset < 0 || end > part.packs[pack].size) badManifest("a piece is not within its pack");
    part.offset[piece] = offset;
    this.ends[pack] = end;
  }
}
