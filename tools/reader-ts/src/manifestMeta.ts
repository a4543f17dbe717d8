/** The metadata entry of a manifest part (SPEC 11.3). */
import { badManifest } from "./arrow.js";
import { fail, quote } from "./errors.js";
import { checkRequires, Fields } from "./fields.js";
import { decodeUtf8, parseJson } from "./json.js";
import { fileKey, HEX64, packKey } from "./keys.js";
import { type Limits, within } from "./limits.js";

export interface PackEntry {
  /** The key, or the URL of an external object. */
  readonly source: string;
  readonly size: number;
  /** External objects only. */
  readonly sha256: string | null;
}

export interface FileEntry {
  readonly path: string;
  readonly key: string;
  readonly size: number;
  readonly sha256: string;
}

export interface PartMeta {
  readonly packs: PackEntry[];
  readonly files: FileEntry[];
}

export interface Expected {
  readonly digest: string;
  readonly blockBytes: number;
  readonly parent: number | null;
}

/** DF-LIM-02 allows a bound on all values: numbers and strings in unknown members cannot fill the memory either. */
const MAX_VALUES = 2 ** 22;

export function parseMeta(entries: readonly Uint8Array[], expected: Expected, limits: Limits): PartMeta {
  if (entries.length !== 1) badManifest(`${entries.length} metadata entries`);
  within(entries[0].length, limits.metadataBytes, "metadata of a manifest part");
  const meta = new Fields(parseJson(entries[0], { containers: limits.metadataContainers, values: MAX_VALUES }), "manifest metadata");
  if (meta.string("format") !== "deltaformat-manifest/1") fail("format-unknown", "unknown manifest format");
  checkRequires(meta);
  const digest = meta.string("digest");
  const blockBytes = meta.integer("block_bytes");
  const parent = meta.integerOrNull("parent");
  if (digest !== expected.digest || blockBytes !== expected.blockBytes || parent !== expected.parent) {
    fail("parts-disagree", "a manifest part contradicts the descriptor or the record"); // DF-MAN-09
  }
  within(meta.array("packs").length, limits.packs, "packs in a part's table");
  const packs = meta.objects("packs").map((entry) => packEntry(entry, limits));
  // DF-MAN-11
  if (new Set(packs.map((p) => p.source)).size !== packs.length) badManifest("two packs of one key or url");
  return { packs, files: meta.objects("files").map((entry) => fileEntry(entry, limits)) };
}

function packEntry(entry: Fields, limits: Limits): PackEntry {
  const size = entry.integer("size");
  within(size, limits.packBytes, "size of a pack");
  if (entry.has("key")) {
    if (entry.has("url")) fail("value-invalid", "a pack with both a key and a url");
    const key = entry.string("key");
    packKey(key);
    return { source: key, size, sha256: null };
  }
  return { source: entry.string("url"), size, sha256: entry.matching("sha256", HEX64) };
}

function fileEntry(entry: Fields, limits: Limits): FileEntry {
  const path = entry.string("path");
  const key = entry.string("key");
  const size = entry.integer("size");
  checkPath(path);
  within(size, limits.packBytes, "size of a file");
  return { path, key, size, sha256: fileKey(key).sha256 };
}

const FORBIDDEN = /[\u0000-\u001f\u007f-\u009f\\:]/;
const MAX_PATH_BYTES = 1024;
const ENCODER = new TextEncoder();

/** DF-MAN-10 */
function checkPath(path: string): void {
  const segments = path.split("/");
  const unsafe = FORBIDDEN.test(path) || ENCODER.encode(path).length > MAX_PATH_BYTES
    || segments.some((s) => s === "" || s === "." || s === "..");
  if (unsafe) fail("path-unsafe", `the path ${quote(path)} of a file is not allowed`);
}

export function nameOf(bytes: Uint8Array, what: string): string {
  return decodeUtf8(bytes) ?? badManifest(`${what} is not UTF-8`);
}
