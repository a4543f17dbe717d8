/** Records of the log, by their members (SPEC 12.1). Whether a record is valid is judged in judge.ts. */
import { checkedBody } from "./check.js";
import { isBlockSize } from "./descriptor.js";
import { fail, quote } from "./errors.js";
import { checkRequires, Fields, integerEntry } from "./fields.js";
import { DIGESTS, type Hashes, hex } from "./hash.js";
import { type JsonObject, parseCounted } from "./json.js";
import { HEX32, HEX64, manifestKey, NAME, packOrFileKey } from "./keys.js";
import { CEILINGS, type Limits, within } from "./limits.js";

export interface Head {
  readonly seq: number | null;
  readonly step: number | null;
  readonly epoch: number;
  readonly claim: number | null;
}

/** A branch's name to its head: the state that matters to the next record. */
export type Heads = ReadonlyMap<string, Head>;

interface Common {
  readonly seq: number;
  readonly prev: string | null;
  readonly heads: Heads;
  readonly lastTag: number | null;
  readonly lastRetire: number | null;
  /** SHA-256 of the record's bytes: what the next record's `prev` must be. */
  readonly hash: string;
  readonly size: number;
  /** Objects and arrays in it (SPEC 16). */
  readonly containers: number;
}

export interface ManifestRef {
  readonly key: string;
  readonly sha256: string;
  readonly size: number;
  readonly contentSize: number;
}

export interface Ancestor {
  readonly depth: number;
  readonly seq: number;
  readonly step: number;
}

export interface CommitRecord extends Common {
  readonly kind: "commit";
  readonly branch: string;
  readonly claim: number;
  readonly step: number;
  readonly parent: number | null;
  readonly depth: number;
  readonly ancestors: readonly Ancestor[];
  readonly root: string;
  readonly manifests: readonly ManifestRef[];
  /** The claims in the keys of manifests and added objects, each once. */
  readonly claims: ReadonlySet<string>;
  readonly metadata: JsonObject;
}

export interface ClaimRecord extends Common {
  readonly kind: "claim";
  readonly branch: string;
  readonly epoch: number;
  readonly resumeFrom: number | null;
}

export interface ForkRecord extends Common {
  readonly kind: "fork";
  readonly branch: string;
  readonly source: number;
  readonly step: number;
}

export interface TagRecord extends Common {
  readonly kind: "tag";
  readonly name: string;
  readonly target: number | null;
}

export interface DropRecord extends Common {
  readonly kind: "drop";
  readonly branch: string;
}

export interface RetireRecord extends Common {
  readonly kind: "retire";
  readonly commits: readonly number[];
}

export type LogRecord = CommitRecord | ClaimRecord | ForkRecord | TagRecord | DropRecord | RetireRecord;

const KINDS: readonly string[] = ["claim", "commit", "fork", "tag", "drop", "retire"];
const ROOT = /^df1:([a-z0-9-]{1,255}):([1-9][0-9]{0,7}):[0-9a-f]{64}$/;

export function parseRecord(bytes: Uint8Array, seq: number, hashes: Hashes): LogRecord {
  const what = `record ${seq}`;
  checkedBody(bytes, what, hashes);
  const { object, containers } = parseCounted(bytes, { containers: CEILINGS.recordContainers });
  const fields = new Fields(object, what);
  checkRequires(fields);
  const kind = fields.string("kind");
  if (!KINDS.includes(kind)) fail("format-unknown", `${what} is of the unknown kind ${quote(kind)}`); // DF-LOG-03
  const common = readCommon(fields, hex(hashes.sha256(bytes)), bytes.length, containers);
  const record = readKind(kind, fields, common);
  if (common.seq !== seq) fail("record-misplaced", `${what} says that it is record ${common.seq}`); // DF-LOG-02
  if ((common.prev === null) !== (seq === 0)) fail("chain-broken", `${what} has a prev that cannot be`);
  return record;
}

function readCommon(fields: Fields, hash: string, size: number, containers: number): Common {
  fields.matching("nonce", HEX32);
  fields.string("time"); // informative: any value (DF-LOG-11)
  const prev = fields.stringOrNull("prev");
  if (prev !== null) fields.matching("prev", HEX64);
  return {
    seq: fields.integer("seq"),
    prev,
    heads: readHeads(fields.child("heads")),
    lastTag: fields.integerOrNull("last_tag"),
    lastRetire: fields.integerOrNull("last_retire"),
    hash,
    size,
    containers,
  };
}

function readHeads(fields: Fields): Heads {
  within(fields.object.size, CEILINGS.branches, "branches");
  const heads = new Map<string, Head>();
  for (const [name, value] of fields.object) {
    checkName(name, "a branch");
    const head = Fields.of(value, fields.what);
    heads.set(name, {
      seq: head.integerOrNull("seq"),
      step: head.integerOrNull("step"),
      epoch: head.integer("epoch"),
      claim: head.integerOrNull("claim"),
    });
  }
  return heads;
}

/** DF-LOG-01 */
function checkName(name: string, what: string): string {
  if (!NAME.test(name)) fail("value-invalid", `${quote(name)} is not the name of ${what}`);
  return name;
}

function readKind(kind: string, fields: Fields, common: Common): LogRecord {
  const branch = (): string => checkName(fields.string("branch"), "a branch");
  switch (kind) {
    case "claim":
      fields.string("host");
      fields.signed("pid");
      fields.boolean("single_writer");
      return {
        ...common, kind, branch: branch(), epoch: fields.integer("epoch"), resumeFrom: fields.integerOrNull("resume_from"),
      };
    case "commit":
      return readCommit(fields, common, branch());
    case "fork":
      return { ...common, kind, branch: branch(), source: fields.integer("source"), step: fields.integer("step") };
    case "tag":
      return { ...common, kind, name: checkName(fields.string("name"), "a tag"), target: fields.integerOrNull("target") };
    case "drop":
      return { ...common, kind, branch: branch() };
    default:
      return { ...common, kind: "retire", commits: fields.integers("commits") };
  }
}

function readCommit(fields: Fields, common: Common, branch: string): CommitRecord {
  const claims = new Set<string>();
  const manifests = fields.objects("manifests").map((entry) => {
    const key = entry.string("key");
    const { claim, sha256 } = manifestKey(key);
    claims.add(claim);
    return { key, sha256, size: objectSize(entry), contentSize: entry.integer("content_size") };
  });
  checkManifestLimits(manifests, CEILINGS);
  // DF-LOG-11
  if (manifests.length === 0) fail("value-invalid", `${fields.what} names no manifest`);
  if (new Set(manifests.map((m) => m.key)).size !== manifests.length) {
    fail("value-invalid", `${fields.what} names a manifest twice`);
  }
  for (const claim of readObjects(fields, "objects_added")) claims.add(claim);
  readObjects(fields, "objects_dropped");
  return {
    ...common,
    kind: "commit",
    branch,
    claim: fields.integer("claim"),
    step: fields.integer("step"),
    parent: fields.integerOrNull("parent"),
    depth: fields.integer("depth"),
    ancestors: fields.array("ancestors").map((entry) => {
      const what = `${fields.what}: an entry of ancestors`;
      if (!Array.isArray(entry) || entry.length !== 3) fail("json-invalid", `${what} is not [depth, seq, step]`);
      const [depth, seq, step] = entry.map((value) => integerEntry(value, what));
      return { depth, seq, step };
    }),
    root: readRoot(fields),
    manifests,
    claims,
    metadata: fields.child("metadata").object,
  };
}

/**
 * DF-LIM-01. A record that no reader may accept is refused wherever it is met; the reader's own limits count where the
 * version is opened, so that one version that is too large for it does not hide the others.
 */
export function checkCommitLimits(commit: CommitRecord, limits: Limits): void {
  within(commit.containers, limits.recordContainers, "objects and arrays in a record");
  within(commit.heads.size, limits.branches, "branches");
  checkManifestLimits(commit.manifests, limits);
}

function checkManifestLimits(
  manifests: readonly ManifestRef[], limits: Pick<Limits, "manifestParts" | "manifestBytes" | "manifestBytesTotal">,
): void {
  within(manifests.length, limits.manifestParts, "manifest parts of a version");
  for (const { contentSize } of manifests) within(contentSize, limits.manifestBytes, "decompressed size of a manifest part");
  const total = manifests.reduce((sum, { contentSize }) => sum + contentSize, 0);
  within(total, limits.manifestBytesTotal, "manifest parts of a version, in all");
}

/** The printed form of SPEC 7.1: its digest and block size follow the rules of the descriptor's. */
function readRoot(fields: Fields): string {
  const root = fields.matching("root", ROOT);
  const [, digest, blockBytes] = ROOT.exec(root)!;
  if (!DIGESTS.includes(digest)) fail("digest-unknown", `${fields.what}: unknown digest ${quote(digest)}`);
  if (!isBlockSize(Number(blockBytes))) fail("value-invalid", `${fields.what}: a block size of ${blockBytes}`);
  return root;
}

/** DF-LIM-02. SPEC 16 bounds packs; no object of another kind needs to be larger. */
function objectSize(entry: Fields): number {
  const size = entry.integer("size");
  within(size, CEILINGS.packBytes, "size of an object");
  return size;
}

/** The claims in the keys of a list of objects. */
function readObjects(fields: Fields, name: string): string[] {
  return fields.objects(name).map((entry) => {
    objectSize(entry);
    return packOrFileKey(entry.string("key")).claim;
  });
}
