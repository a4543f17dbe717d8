/** The operations of the conformance suite's adapter protocol. */
import { createHash } from "node:crypto";
import { type DeltaformatError, isError } from "./errors.js";
import type { Limits } from "./limits.js";
import { type At, type AxisRange, openStore, type Snapshot, type StoreReader, type Version } from "./node.js";

interface Request {
  id: unknown;
  op: string;
  store: string;
  at: At;
  from: At;
  select?: string[] | null;
  allow?: string[];
  limits?: Partial<Limits>;
  tensor: string;
  ranges: AxisRange[];
}

type Reply = Record<string, unknown>;

const IMPLEMENTATION = "deltaformat-reader-ts 0.1.0";
const PROFILES = ["reader-core", "reader-full"];

export async function answer(line: string): Promise<Reply> {
  let id: unknown = null;
  try {
    const request = JSON.parse(line) as Request;
    id = request.id;
    return { id, ...(await perform(request)) };
  } catch (e) {
    if (isError(e)) return { id, ...rejection(e) };
    // Not a rejection: the runner counts it as a failure.
    return { id, result: "crash", message: e instanceof Error ? `${e.message}\n${e.stack}` : String(e) };
  }
}

function rejection(e: DeltaformatError): Reply {
  return { result: "error", class: e.class, code: e.code, message: e.message };
}

async function perform(request: Request): Promise<Reply> {
  const { op } = request;
  if (op === "hello") return { result: "ok", implementation: IMPLEMENTATION, profiles: PROFILES, features: ["file-url"] };
  if (!["read", "open", "slice", "follow", "state"].includes(op)) return { result: "skip", reason: `no operation ${op}` };
  const store = await openStore(request.store, { allow: request.allow ?? [], limits: request.limits ?? {} });
  switch (op) {
    case "state":
      return { result: "ok", ...(await store.state()) };
    case "slice":
      return slice(store, request);
    case "follow":
      return follow(store, request);
    default: {
      const version = await store.version(request.at);
      return op === "open" ? opened(version) : read(version, request.select ?? null);
    }
  }
}

const byPath = (a: { path: string }, b: { path: string }): number => Buffer.compare(Buffer.from(a.path), Buffer.from(b.path));

function opened(version: Version): Reply {
  return {
    ...head(version),
    tensors: version.names().map((name) => version.info(name)),
    files: version.files().map(({ path, size }) => ({ path, size })).sort(byPath),
  };
}

function head(version: Version): Reply {
  return { result: "ok", seq: version.seq, step: version.step, root: version.root };
}

async function read(version: Version, select: string[] | null): Promise<Reply> {
  const names = version.names();
  const chosen = new Set(select === null ? names : select.map((name) => version.info(name).name));
  const hashes = new Map(names.filter((name) => chosen.has(name)).map((name) => [name, createHash("sha256")]));
  await version.readBlocks(hashes.keys(), (block, name) => void hashes.get(name)!.update(block));
  const tensors = [...hashes].map(([name, hash]) => ({ ...version.info(name), sha256: hash.digest("hex") }));
  return { ...head(version), tensors, files: select === null ? await readFiles(version) : [] };
}

async function readFiles(version: Version): Promise<Reply[]> {
  const files = [];
  for (const { path, size } of version.files().sort(byPath)) files.push({ path, size, sha256: sha256(await version.readFile(path)) });
  return files;
}

async function slice(store: StoreReader, { at, tensor, ranges }: Request): Promise<Reply> {
  const version = await store.version(at);
  const { dtype, shape, bytes } = await version.getSlice(tensor, ranges);
  return { result: "ok", dtype, shape, nbytes: bytes.length, sha256: sha256(bytes) };
}

async function follow(store: StoreReader, { from, at }: Request): Promise<Reply> {
  const held = await store.load(await store.version(from));
  try {
    const { version, tensors } = await store.follow(held, at);
    return {
      ...head(version),
      tensors: version.names().map((name) => ({ ...version.info(name), sha256: sha256(tensors.get(name)!) })),
      files: await readFiles(version),
    };
  } catch (e) {
    if (!isError(e)) throw e;
    return { ...rejection(e), held: heldTensors(held) };
  }
}

function heldTensors({ version, tensors }: Snapshot): Reply[] {
  return version.names().map((name) => ({ name, sha256: sha256(tensors.get(name)!) }));
}

function sha256(bytes: Uint8Array): string {
  return createHash("sha256").update(bytes).digest("hex");
}
