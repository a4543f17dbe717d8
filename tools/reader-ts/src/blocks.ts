/** Blocks from their chains: fetched, decoded in order, and checked against their digests (DF-DIG-01). */
import type { Descriptor } from "./descriptor.js";
import { DeltaformatError, fail, isError, quote } from "./errors.js";
import type { ExternalReader } from "./external.js";
import { equalBytes, type Hashes } from "./hash.js";
import { type Limits, within } from "./limits.js";
import { blockDigest, blockLength, Encoding, type Tensor } from "./manifest.js";
import type { PackEntry } from "./manifestMeta.js";
import { exactly, fetchPieces, type Piece } from "./pieces.js";
import { decodePlanes } from "./planes.js";
import { decodeSparse } from "./sparse.js";
import type { Store } from "./store.js";
import { badPayload, PayloadReader } from "./stream.js";

/** A block to be read: the whole chain, or its last `fresh` pieces on top of `base`. */
export interface Wanted {
  readonly tensor: Tensor;
  readonly index: number;
  readonly fresh?: number;
  readonly base?: Uint8Array;
}

/** What is fetched at a time; a block that needs more comes alone. */
const BATCH_BYTES = 16 * 1024 * 1024;
const MIN_BLOCK_MEMORY = 64 * 1024 * 1024;

export function decodePiece(
  encoding: number, bytes: Uint8Array, base: Uint8Array | null, length: number, hashes: Hashes,
): Uint8Array {
  if (encoding === Encoding.raw) {
    if (bytes.length !== length) badPayload("a raw payload of another length than its block"); // DF-ENC-04
    return bytes;
  }
  const payload = new PayloadReader(bytes, hashes);
  return encoding === Encoding.sparse
    ? decodeSparse(payload, base!)
    : decodePlanes(payload, length, encoding === Encoding.planesDelta ? base : null);
}

export class BlockReader {
  constructor(
    private readonly store: Store,
    private readonly external: ExternalReader,
    private readonly descriptor: Descriptor,
    private readonly limits: Limits,
    private readonly hashes: Hashes,
  ) {}

  /** Calls `visit` with every wanted block, in order. The bytes may be a view of more: copy what is kept. */
  async read(wanted: Iterable<Wanted>, visit: (bytes: Uint8Array, block: Wanted) => void): Promise<void> {
    let batch: { block: Wanted; pieces: Piece[] }[] = [];
    let bytes = 0;
    const flush = async (): Promise<void> => {
      const fetched = await fetchPieces(batch.flatMap((b) => b.pieces), this.readRange);
      let at = 0;
      for (const { block, pieces } of batch) {
        const own = fetched.slice(at, (at += pieces.length));
        visit(await this.verified(block, pieces, own), block);
      }
      batch = [];
      bytes = 0;
    };
    for (const block of wanted) {
      const pieces = this.pieces(block);
      const size = this.memory(block, pieces);
      if (batch.length > 0 && bytes + size > BATCH_BYTES) await flush();
      batch.push({ block, pieces });
      bytes += size;
    }
    if (batch.length > 0) await flush();
  }

  private length(block: Wanted): number {
    return blockLength(block.tensor, block.index, this.descriptor.blockBytes);
  }

  /** DF-LIM-02: content and pieces of one block, before they are fetched. */
  private memory(block: Wanted, pieces: readonly Piece[]): number {
    const size = pieces.reduce((sum, piece) => sum + piece.length, this.length(block));
    const cap = this.limits.blockMemory || Math.max(66 * this.descriptor.blockBytes, MIN_BLOCK_MEMORY);
    within(size, cap, "memory for one block");
    return size;
  }

  private span({ tensor, index, fresh }: Wanted): [first: number, end: number] {
    const { firstPiece } = tensor.part;
    const at = tensor.firstBlock + index;
    return [fresh === undefined ? firstPiece[at] : firstPiece[at + 1] - fresh, firstPiece[at + 1]];
  }

  private pieces(block: Wanted): Piece[] {
    const { part } = block.tensor;
    const [first, end] = this.span(block);
    const pieces: Piece[] = [];
    for (let i = first; i < end; i++) {
      pieces.push({ pack: part.packs[part.pack[i]], offset: part.offset[i], length: part.length[i] });
    }
    return pieces;
  }

  private readonly readRange = async (pack: PackEntry, start: number, end: number): Promise<Uint8Array> => {
    if (pack.sha256 !== null) return this.external.getRange(pack, start, end);
    return exactly(await this.store.getRange(pack.source, start, end), end - start, pack.source);
  };

  /** The block; where external bytes do not verify, once more from the store's copies (DF-EXT-03). */
  private async verified(block: Wanted, pieces: Piece[], fetched: (Uint8Array | DeltaformatError)[]): Promise<Uint8Array> {
    try {
      return this.decode(block, fetched);
    } catch (e) {
      if (!isError(e) || !(await this.turnToCopies(pieces))) throw e;
    }
    return this.decode(block, await fetchPieces(pieces, this.readRange));
  }

  private async turnToCopies(pieces: readonly Piece[]): Promise<boolean> {
    let turned = false;
    for (const pack of new Set(pieces.map((piece) => piece.pack))) {
      if (pack.sha256 !== null && (await this.external.turnToCopy(pack))) turned = true;
    }
    return turned;
  }

  private decode(block: Wanted, fetched: readonly (Uint8Array | DeltaformatError)[]): Uint8Array {
    const { tensor, index } = block;
    const length = this.length(block);
    const [first] = this.span(block);
    let content: Uint8Array | null = block.base ?? null;
    fetched.forEach((bytes, i) => {
      if (bytes instanceof DeltaformatError) throw bytes;
      content = decodePiece(tensor.part.encoding[first + i], bytes, content, length, this.hashes);
    });
    return this.check(content!, tensor, index);
  }

  /** DF-DIG-01 */
  check(content: Uint8Array, tensor: Tensor, index: number): Uint8Array {
    if (!this.matches(content, tensor, index)) {
      fail("digest-mismatch", `block ${index} of ${quote(tensor.name)} does not have its digest`);
    }
    return content;
  }

  matches(content: Uint8Array, tensor: Tensor, index: number): boolean {
    return equalBytes(this.descriptor.digest.of(content), blockDigest(tensor, index));
  }
}
