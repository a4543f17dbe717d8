/** Fetches a commit's manifest parts and puts them together (SPEC 11). */
import type { Descriptor } from "./descriptor.js";
import { fail, quote } from "./errors.js";
import { type Hashes, hex } from "./hash.js";
import { type Limits, within } from "./limits.js";
import { type Part, parsePart, type Tensor } from "./manifest.js";
import type { FileEntry } from "./manifestMeta.js";
import { exactly } from "./pieces.js";
import { checkCommitLimits, type CommitRecord, type ManifestRef } from "./records.js";
import { compareBytes, computeRoot } from "./root.js";
import type { Store } from "./store.js";
import { decompressFrame } from "./zstd.js";
import { frameEnd, readFrameHeader } from "./zstdHeader.js";

export interface Contents {
  /** By their names as UTF-8 byte strings. */
  readonly tensors: Tensor[];
  readonly files: FileEntry[];
}

/**
 * Bytes fetched whole from a key that carries their SHA-256 (DF-KEY-02): size first, then hash. More than `cap` bytes are
 * not taken, whatever the stated size.
 */
export async function getVerified(
  store: Store, key: string, size: number, sha256: string, cap: number, hashes: Hashes,
): Promise<Uint8Array> {
  const found = await store.get(key, Math.min(size, cap));
  if (found !== null && size > cap) within(found.length, cap, key);
  const bytes = exactly(found, size, key);
  if (hex(hashes.sha256(bytes)) !== sha256) fail("hash-mismatch", `${key} does not have its hash`);
  return bytes;
}

/** DF-MAN-02: everything that can be checked is, before the part is decompressed. */
function decompressPart(bytes: Uint8Array, ref: ManifestRef, hashes: Hashes): Uint8Array {
  const bad = (reason: string): never => fail("manifest-invalid", `${ref.key}: ${reason}`);
  const header = readFrameHeader(bytes);
  if (typeof header === "string") return bad(header);
  if (header.contentSize !== ref.contentSize) bad("its content size is not the record's");
  const end = frameEnd(bytes, header);
  if (end < 0) fail("frame-corrupt", `${ref.key}: a zstd frame is cut short`);
  if (end < bytes.length) bad("bytes after the zstd frame");
  return decompressFrame(bytes, header, hashes);
}

export async function loadContents(
  store: Store, descriptor: Descriptor, commit: CommitRecord, limits: Limits, hashes: Hashes,
): Promise<Contents> {
  const { manifests, parent } = commit;
  checkCommitLimits(commit, limits);
  const expected = { digest: descriptor.digest.name, blockBytes: descriptor.blockBytes, parent };
  const parts: Part[] = [];
  let count = 0;
  for (const ref of manifests) {
    // Not in SPEC 16: a frame is hardly larger than its content.
    const bytes = await getVerified(store, ref.key, ref.size, ref.sha256, 2 * limits.manifestBytes, hashes);
    const part = parsePart(decompressPart(bytes, ref, hashes), expected, descriptor.digest.bytes, limits);
    count += part.tensors.length;
    within(count, limits.tensors, "tensors of a version");
    parts.push(part);
  }
  checkPacks(parts, limits);
  const contents = { tensors: sortedTensors(parts), files: allFiles(parts) };
  // DF-DIG-04
  if (computeRoot(contents.tensors, descriptor, hashes) !== commit.root) {
    fail("root-mismatch", `the root of record ${commit.seq} is not that of its manifest`);
  }
  return contents;
}

/** Parts that name the same object must say the same of it. */
function checkPacks(parts: readonly Part[], limits: Limits): void {
  const seen = new Map<string, { size: number; sha256: string | null }>();
  for (const pack of parts.flatMap((part) => part.packs)) {
    const known = seen.get(pack.source);
    if (known !== undefined && (known.size !== pack.size || known.sha256 !== pack.sha256)) {
      fail("parts-disagree", "manifest parts contradict each other on a pack");
    }
    seen.set(pack.source, pack);
  }
  within(seen.size, limits.packs, "packs of a version");
}

function sortedTensors(parts: readonly Part[]): Tensor[] {
  const tensors = parts.flatMap((part) => part.tensors).sort((a, b) => compareBytes(a.nameBytes, b.nameBytes));
  for (let i = 1; i < tensors.length; i++) {
    if (tensors[i].name === tensors[i - 1].name) {
      fail("parts-disagree", `tensor ${quote(tensors[i].name)} occurs twice`); // DF-MAN-05
    }
  }
  return tensors;
}

function allFiles(parts: readonly Part[]): FileEntry[] {
  const files = parts.flatMap((part) => part.files);
  const paths = new Set<string>();
  for (const { path } of files) {
    if (paths.has(path)) fail("path-unsafe", `two files have the path ${quote(path)}`); // DF-MAN-10
    paths.add(path);
  }
  return files;
}
