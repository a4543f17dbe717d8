/** Going from a version that is held to a later one by fresh pieces only (SPEC 11.2, DF-RD-02). */
import type { BlockReader, Wanted } from "./blocks.js";
import { badManifest } from "./arrow.js";
import { equalBytes } from "./hash.js";
import { type Limits, within } from "./limits.js";
import { blockDigest, blockLength, type Tensor } from "./manifest.js";
import { allocate, type Version } from "./version.js";

/** A version with all its tensors in memory. */
export interface Snapshot {
  readonly version: Version;
  readonly tensors: ReadonlyMap<string, Uint8Array>;
}

export async function loadWhole(version: Version, limits: Limits): Promise<Snapshot> {
  const tensors = new Map<string, Uint8Array>();
  const ends = new Map<string, number>();
  for (const name of version.names()) {
    tensors.set(name, room(version.tensor(name), limits));
    ends.set(name, 0);
  }
  await version.readBlocks(version.names(), (block, name) => {
    const at = ends.get(name)!;
    tensors.get(name)!.set(block, at);
    ends.set(name, at + block.length);
  });
  return { version, tensors };
}

function room(tensor: Tensor, limits: Limits): Uint8Array {
  within(tensor.nbytes, limits.resultBytes, "size of a tensor");
  return allocate(tensor.nbytes);
}

const UNCHANGED = 0;
const NO_RELATION = 255;

/**
 * `next` is a child of the held version. What is held is only read, so a failure leaves it as it was (DF-RD-03). Held
 * bytes are the caller's: a block of them counts only if it still has its digest; otherwise the chain is read.
 */
export async function advance(held: Snapshot, next: Version, blocks: BlockReader, blockBytes: number, limits: Limits): Promise<Snapshot> {
  for (const name of next.names()) checkFresh(next.tensor(name), held.version.find(name), blockBytes);
  const tensors = new Map<string, Uint8Array>();
  const changed = function* (): Generator<Wanted> {
    for (const name of next.names()) {
      const tensor = next.tensor(name);
      const bytes = room(tensor, limits);
      tensors.set(name, bytes);
      yield* changedBlocks(tensor, held.version.find(name), held.tensors.get(name), blocks, blockBytes, bytes);
    }
  };
  await next.read(changed(), (content, { tensor, index }) => tensors.get(tensor.name)!.set(content, index * blockBytes));
  return { version: next, tensors };
}

/** Copies the blocks that did not change, once checked, and yields the others. */
function* changedBlocks(
  tensor: Tensor, old: Tensor | undefined, held: Uint8Array | undefined, blocks: BlockReader, blockBytes: number, to: Uint8Array,
): Generator<Wanted> {
  for (let index = 0; index < tensor.blocks; index++) {
    const fresh = tensor.part.fresh[tensor.firstBlock + index];
    if (fresh === NO_RELATION || old === undefined || held === undefined) {
      yield { tensor, index };
      continue;
    }
    const at = index * blockBytes;
    const base = held.subarray(at, at + blockLength(tensor, index, blockBytes));
    if (!blocks.matches(base, old, index)) yield { tensor, index };
    else if (fresh === UNCHANGED) to.set(base, at); // the digests are equal: checkFresh
    else yield { tensor, index, fresh, base };
  }
}

/** DF-MAN-08 */
function checkFresh(tensor: Tensor, old: Tensor | undefined, blockBytes: number): void {
  for (let index = 0; index < tensor.blocks; index++) {
    const fresh = tensor.part.fresh[tensor.firstBlock + index];
    if (fresh === NO_RELATION) continue;
    if (old === undefined || index >= old.blocks || blockLength(old, index, blockBytes) !== blockLength(tensor, index, blockBytes)) {
      badManifest("a fresh block without a counterpart in the parent");
    }
    if (fresh === UNCHANGED && !equalBytes(blockDigest(tensor, index), blockDigest(old, index))) {
      badManifest("a block that is called unchanged has another digest");
    }
  }
}
