/** Makes stores for tests: correct ones by default, and broken ones by the hooks. */
import { createHash } from "node:crypto";
import { mkdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import {
  Field, FixedSizeBinary, Int64, List, RecordBatch, Schema, Table, tableToIPC, Uint32, Uint8, Utf8, type DataType, type Vector, vectorFromArray,
} from "apache-arrow";
import type { Descriptor } from "../src/descriptor.js";
import { digestNamed, type Hashes, loadHashes } from "../src/hash.js";
import { ancestorsAfter, type CommitInfo } from "../src/judge.js";
import { pad20, recordKey } from "../src/keys.js";
import { computeRoot } from "../src/root.js";
import type { Tensor } from "../src/manifest.js";
import { MemoryStore } from "./memoryStore.js";

export type Json = null | boolean | number | string | Json[] | { [name: string]: Json };
export type Members = { [name: string]: Json };

export interface PieceSpec {
  encoding: number;
  payload: Uint8Array;
  /** External objects: the piece is their first bytes. */
  external?: { url: string };
}

export interface BlockSpec {
  content: Uint8Array;
  pieces: PieceSpec[];
  fresh?: number;
}

export interface TensorSpec {
  name: string;
  dtype: string;
  shape: number[];
  blocks: BlockSpec[];
}

export interface CommitSpec {
  branch?: string;
  step: number;
  tensors: TensorSpec[];
  files?: { path: string; content: Uint8Array }[];
  meta?: (meta: Members) => void;
  columns?: (columns: Record<string, Vector>) => void;
  manifest?: (arrow: Uint8Array) => Uint8Array;
  record?: (record: Members) => void;
}

const ENCODER = new TextEncoder();

export function bytesOf(hexText: string): Uint8Array {
  return new Uint8Array(Buffer.from(hexText.replace(/\s/g, ""), "hex"));
}

export function sha256(bytes: Uint8Array): string {
  return createHash("sha256").update(bytes).digest("hex");
}

export function checked(members: Members): Uint8Array {
  const body = JSON.stringify(members).slice(0, -1);
  return ENCODER.encode(`${body},"check":"${sha256(ENCODER.encode(body))}"}`);
}

/** A zstd frame of stored blocks, with a window of 128 KiB. */
export function zstdStored(content: Uint8Array): Uint8Array {
  const size = 128 * 1024;
  const parts = [bytesOf("28b52ffd8038"), new Uint8Array(new Uint32Array([content.length]).buffer)];
  for (let at = 0; at === 0 || at < content.length; at += size) {
    const block = content.subarray(at, at + size);
    const last = at + size >= content.length ? 1 : 0;
    const head = (block.length << 3) | last;
    parts.push(Uint8Array.of(head & 255, (head >> 8) & 255, head >> 16), block);
  }
  return Buffer.concat(parts);
}

export function raw(content: Uint8Array): BlockSpec {
  return { content, pieces: [{ encoding: 0, payload: content }] };
}

/** A tensor of raw blocks. */
export function rawTensor(name: string, dtype: string, shape: number[], content: Uint8Array, blockBytes: number): TensorSpec {
  const blocks = [];
  for (let at = 0; at < content.length; at += blockBytes) blocks.push(raw(content.subarray(at, at + blockBytes)));
  return { name, dtype, shape, blocks };
}

export function listOf(item: DataType, rows: unknown[]): Vector {
  return vectorFromArray(rows, new List(new Field("item", item, false)));
}

export function arrowFile(columns: Record<string, Vector>, metadata: Map<string, string>): Uint8Array {
  const fields = Object.entries(columns).map(([name, vector]) => new Field(name, vector.type, false));
  const schema = new Schema(fields, metadata);
  const table = new Table(columns as Record<string, Vector>);
  return tableToIPC(new Table(schema, table.batches.map((batch) => new RecordBatch(schema, batch.data))), "file");
}

export class Builder {
  readonly store = new MemoryStore();
  private readonly heads = new Map<string, { seq: number | null; step: number | null; epoch: number; claim: number | null }>();
  private readonly commits = new Map<number, CommitInfo>();
  private prev: string | null = null;
  private lastTag: number | null = null;
  private lastRetire: number | null = null;
  seq = 0;

  private constructor(private readonly hashes: Hashes, readonly descriptor: Descriptor) {
    this.store.objects.set("deltaformat.json", checked({
      format: "deltaformat/1", uuid: "0123456789abcdef0123456789abcdef", digest: descriptor.digest.name,
      block_bytes: descriptor.blockBytes, log: "log/{seq:020}.json", requires: [], time: "",
    }));
  }

  static async make(blockBytes = 256, digest = "xxh3-128"): Promise<Builder> {
    const hashes = await loadHashes();
    return new Builder(hashes, { uuid: "", blockBytes, digest: digestNamed(digest, hashes) });
  }

  /** Adds a record; `valid` says whether the builder's own state follows it. */
  record(kind: string, members: Members, valid = true, change?: (record: Members) => void): number {
    const seq = this.seq++;
    const record: Members = {
      kind, seq, prev: this.prev, nonce: pad20(seq).padStart(32, "0"), time: "", heads: Object.fromEntries(this.heads),
      last_tag: this.lastTag, last_retire: this.lastRetire, requires: [], ...members,
    };
    change?.(record);
    const bytes = checked(record);
    this.store.objects.set(recordKey(seq), bytes);
    this.prev = sha256(bytes);
    if (valid && kind === "tag") this.lastTag = seq;
    if (valid && kind === "retire") this.lastRetire = seq;
    return seq;
  }

  claim(branch = "main", resumeFrom: number | null = null): number {
    const old = this.heads.get(branch);
    const resumed = resumeFrom === null ? undefined : this.commits.get(resumeFrom)!;
    const epoch = (old?.epoch ?? 0) + 1;
    this.heads.set(branch, {
      seq: resumed?.seq ?? old?.seq ?? null, step: resumed?.step ?? old?.step ?? null, epoch, claim: this.seq,
    });
    return this.record("claim", { branch, epoch, host: "h", pid: 1, resume_from: resumeFrom, single_writer: false });
  }

  fork(branch: string, source: number): number {
    const { step } = this.commits.get(source)!;
    this.heads.set(branch, { seq: source, step, epoch: 0, claim: null });
    return this.record("fork", { branch, source, step });
  }

  drop(branch: string): number {
    this.heads.delete(branch);
    return this.record("drop", { branch });
  }

  /** A commit that follows its branch's head. */
  commit(spec: CommitSpec): number {
    const branch = spec.branch ?? "main";
    const head = this.heads.get(branch)!;
    const parent = head.seq === null ? null : this.commits.get(head.seq)!;
    const claim = pad20(head.claim!);
    const { manifest, root, added } = this.objects(spec, claim, head.seq);
    const ancestors = ancestorsAfter(parent);
    const depth = parent === null ? 0 : parent.depth + 1;
    this.commits.set(this.seq, { seq: this.seq, step: spec.step, depth, parent: head.seq, ancestors });
    this.heads.set(branch, { ...head, seq: this.seq, step: spec.step });
    return this.record("commit", {
      branch, claim: head.claim, step: spec.step, parent: head.seq, depth, ancestors: ancestors.map((a) => [a.depth, a.seq, a.step]),
      root, manifests: [manifest], objects_added: added, objects_dropped: [], metadata: {},
    }, true, spec.record);
  }

  private put(key: string, bytes: Uint8Array): Members {
    this.store.objects.set(key, bytes);
    return { key, size: bytes.length };
  }

  private objects(spec: CommitSpec, claim: string, parent: number | null): { manifest: Members; root: string; added: Members[] } {
    const payloads: Uint8Array[] = [];
    const external = new Map<string, Uint8Array>();
    const pieces = spec.tensors.flatMap((t) => t.blocks.flatMap((b) => b.pieces));
    for (const piece of pieces) {
      if (piece.external === undefined) payloads.push(piece.payload);
      else external.set(piece.external.url, piece.payload);
    }
    const data = Buffer.concat(payloads);
    const header = ENCODER.encode(JSON.stringify({
      __metadata__: { nonce: String(this.seq) }, "deltaformat.payload": { dtype: "U8", shape: [data.length], data_offsets: [0, data.length] },
    }));
    const head = new Uint8Array(8);
    new DataView(head.buffer).setUint32(0, header.length, true);
    const pack = Buffer.concat([head, header, data]);
    const packEntry = this.put(`packs/${claim}/${sha256(pack)}.safetensors`, pack);
    const added = [packEntry];
    const files = (spec.files ?? []).map(({ path, content }) => {
      const entry = this.put(`files/${claim}/${sha256(content)}`, content);
      added.push(entry);
      return { path, ...entry };
    });
    const urls = [...external.keys()];
    const meta: Members = {
      format: "deltaformat-manifest/1", digest: this.descriptor.digest.name, block_bytes: this.descriptor.blockBytes, parent,
      packs: [packEntry, ...urls.map((url) => ({ url, size: external.get(url)!.length, sha256: sha256(external.get(url)!) }))],
      files, requires: [],
    };
    spec.meta?.(meta);
    const columns = this.columns(spec.tensors, 8 + header.length, urls);
    spec.columns?.(columns);
    const plain = arrowFile(columns, new Map([["deltaformat", JSON.stringify(meta)]]));
    const arrow = spec.manifest?.(plain) ?? plain;
    const packed = zstdStored(arrow);
    const manifest = { ...this.put(`manifests/${claim}/${sha256(packed)}.arrow.zst`, packed), content_size: arrow.length };
    return { manifest, root: this.root(spec.tensors), added };
  }

  private columns(tensors: TensorSpec[], dataAt: number, urls: string[]): Record<string, Vector> {
    const { digest } = this.descriptor;
    let started = false;
    const gap = (piece: PieceSpec): bigint => {
      if (piece.external !== undefined || started) return 0n;
      started = true;
      return BigInt(dataAt);
    };
    const perBlock = <T>(of: (b: BlockSpec) => T): T[][] => tensors.map((t) => t.blocks.map(of));
    const perPiece = <T>(of: (p: PieceSpec) => T): T[][] => tensors.map((t) => t.blocks.flatMap((b) => b.pieces.map(of)));
    return {
      name: vectorFromArray(tensors.map((t) => t.name), new Utf8()),
      dtype: vectorFromArray(tensors.map((t) => t.dtype), new Utf8()),
      shape: listOf(new Int64(), tensors.map((t) => t.shape.map(BigInt))),
      digest: listOf(new FixedSizeBinary(digest.bytes), perBlock((b) => digest.of(b.content))),
      fresh: listOf(new Uint8(), perBlock((b) => b.fresh ?? 255)),
      depth: listOf(new Uint8(), perBlock((b) => b.pieces.length)),
      pack: listOf(new Uint32(), perPiece((p) => (p.external === undefined ? 0 : 1 + urls.indexOf(p.external.url)))),
      gap: listOf(new Int64(), perPiece(gap)),
      length: listOf(new Uint32(), perPiece((p) => p.payload.length)),
      encoding: listOf(new Uint8(), perPiece((p) => p.encoding)),
    };
  }

  private root(tensors: TensorSpec[]): string {
    const { digest } = this.descriptor;
    const made = tensors.map((t) => ({
      nameBytes: ENCODER.encode(t.name), dtype: t.dtype, dims: new Uint32Array(t.shape.flatMap((d) => [d, 0])), blocks: t.blocks.length,
      firstBlock: 0, part: { digestBytes: digest.bytes, digest: Buffer.concat(t.blocks.map((b) => digest.of(b.content))) },
    }) as unknown as Tensor).sort((a, b) => Buffer.compare(a.nameBytes, b.nameBytes));
    return computeRoot(made, this.descriptor, this.hashes);
  }

  hint(seq: number): void {
    this.store.objects.set("hints/tail.json", ENCODER.encode(JSON.stringify({ seq })));
  }

  write(directory: string): void {
    for (const [key, bytes] of this.store.objects) {
      mkdirSync(dirname(join(directory, key)), { recursive: true });
      writeFileSync(join(directory, key), bytes);
    }
  }
}
