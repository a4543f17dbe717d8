/** Manifest parts that break SPEC 11, each by one fault. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import {
  Binary, Dictionary, Field, FixedSizeBinary, Int32, Int64, LargeUtf8, List, makeBuilder, type RecordBatch, RecordBatchFileWriter, Schema,
  tableFromIPC, Uint16, Uint32, Uint8, Utf8, type Vector, vectorFromArray,
} from "apache-arrow";
import { type ErrorCode, openStore } from "../src/index.js";
import { Builder, type CommitSpec, listOf, rawTensor, type TensorSpec } from "./builder.js";

const CONTENT = new Uint8Array(600).map((_, i) => i);
const TENSORS: TensorSpec[] = [
  rawTensor("b", "U8", [600], CONTENT, 256), rawTensor("a", "F32", [2, 2], CONTENT.subarray(0, 16), 256),
  rawTensor("empty", "F64", [0, 3], CONTENT.subarray(0, 0), 256), rawTensor("scalar", "I64", [], CONTENT.subarray(8, 16), 256),
];

async function opened(spec: Partial<CommitSpec>): Promise<string[]> {
  const builder = await Builder.make();
  builder.claim();
  builder.commit({ step: 0, tensors: TENSORS, ...spec });
  const version = await (await openStore(builder.store)).version({ branch: "main" });
  for (const name of version.names()) await version.getTensor(name);
  return version.names();
}

function rejected(title: string, code: ErrorCode, spec: Partial<CommitSpec>): void {
  test(title, () => assert.rejects(opened(spec), { code }));
}

/** The file's batch once more, through another writer. */
function rewritten(file: Uint8Array, change: (schema: Schema, batch: RecordBatch) => { schema: Schema; batches: RecordBatch[] }): Uint8Array {
  const table = tableFromIPC(file);
  const { schema, batches } = change(table.schema, table.batches[0]);
  const writer = new RecordBatchFileWriter();
  writer.reset(undefined, schema);
  for (const batch of batches) writer.write(batch);
  return writer.finish().toUint8Array(true);
}

const withField = (schema: Schema, i: number, metadata: Map<string, string>): Schema => {
  const fields = [...schema.fields];
  fields[i] = new Field(fields[i].name, fields[i].type, false, metadata);
  return new Schema(fields, schema.metadata);
};

/** Replaces one rank of a list column. */
const set = (name: string, vector: Vector) => ({ columns: (columns: Record<string, Vector>) => void (columns[name] = vector) });

describe("manifest parts", () => {
  test("as made", async () => assert.deepEqual(await opened({}), ["a", "b", "empty", "scalar"]));

  test("columns in another order, with others", async () => {
    await opened({
      columns: (columns) => {
        for (const [name, vector] of Object.entries(columns).reverse()) {
          delete columns[name];
          columns[name] = vector;
          columns[`more ${name}`] = listOf(new Binary(), [null, [Uint8Array.of(1)], [null], []]);
        }
      },
    });
  });

  rejected("not an Arrow file", "manifest-invalid", { manifest: () => new Uint8Array(64) });
  rejected("an empty part", "manifest-invalid", { manifest: () => new Uint8Array(0) });
  rejected("a missing column", "manifest-invalid", { columns: (c) => void delete c["gap"] });
  rejected("a column of another type", "manifest-invalid", set("depth", listOf(new Uint16(), [[1, 1, 1], [1], [], [1]])));
  rejected("a signed column", "manifest-invalid", set("pack", listOf(new Int32(), [[0, 0, 0], [0], [], [0]])));
  rejected("a large utf8 column", "manifest-invalid", set("name", vectorFromArray(["b", "a", "empty", "scalar"], new LargeUtf8())));
  rejected("a name that is null", "manifest-invalid", set("name", vectorFromArray(["b", null, "empty", "scalar"], new Utf8())));
  rejected("an entry that is null", "manifest-invalid", set("depth", listOf(new Uint8(), [[1, null, 1], [1], [], [1]])));
  rejected("digests of another width", "manifest-invalid", set("digest", listOf(new FixedSizeBinary(32), [[], [], [], []])));
  rejected("a dictionary", "manifest-invalid", {
    columns: (c) => {
      const builder = makeBuilder({ type: new Dictionary(new Utf8(), new Int32()) });
      for (const text of ["x", "y", "x", "x"]) builder.append(text);
      c["more"] = builder.finish().toVector();
    },
  });
  rejected("two batches", "manifest-invalid", { manifest: (f) => rewritten(f, (schema, batch) => ({ schema, batches: [batch, batch] })) });
  rejected("no batch", "manifest-invalid", { manifest: (f) => rewritten(f, (schema) => ({ schema, batches: [] })) });
  rejected("a doubled column", "manifest-invalid", {
    manifest: (f) => rewritten(f, (schema, batch) => {
      const fields = schema.fields.map((field) => (field.name === "depth" ? new Field("fresh", field.type, false) : field));
      return { schema: new Schema(fields, schema.metadata), batches: [batch] };
    }),
  });
  rejected("custom metadata of a field", "manifest-invalid", {
    manifest: (f) => rewritten(f, (schema, batch) => ({ schema: withField(schema, 0, new Map([["ARROW:extension:name", "x"]])), batches: [batch] })),
  });
  rejected("too many columns", "limit-exceeded", {
    columns: (c) => {
      for (let i = 0; i < 1024; i++) c[`c${i}`] = vectorFromArray([0, 0, 0, 0], new Uint8());
    },
  });

  rejected("a list too short", "manifest-invalid", set("fresh", listOf(new Uint8(), [[255, 255], [255], [], [255]])));
  rejected("depth 0", "manifest-invalid", set("depth", listOf(new Uint8(), [[1, 0, 1], [1], [], [1]])));
  rejected("depth 65", "manifest-invalid", set("depth", listOf(new Uint8(), [[65, 1, 1], [1], [], [1]])));
  rejected("fresh without a parent", "manifest-invalid", set("fresh", listOf(new Uint8(), [[0, 255, 255], [255], [], [255]])));
  rejected("an unknown encoding", "encoding-unknown", set("encoding", listOf(new Uint8(), [[4, 0, 0], [0], [], [0]])));
  rejected("a first piece that needs a base", "payload-invalid", set("encoding", listOf(new Uint8(), [[3, 0, 0], [0], [], [0]])));
  rejected("a pack beyond the table", "manifest-invalid", set("pack", listOf(new Uint32(), [[0, 1, 0], [0], [], [0]])));
  rejected("a piece of no length", "manifest-invalid", set("length", listOf(new Uint32(), [[256, 0, 88], [16], [], [8]])));
  rejected("a piece beyond its pack", "manifest-invalid", set("gap", listOf(new Int64(), [[0n, 0n, 0n], [0n], [], [5000n]])));
  rejected("a raw piece of another length", "payload-invalid", set("length", listOf(new Uint32(), [[256, 255, 88], [16], [], [8]])));
  rejected("a piece before its pack", "manifest-invalid", set("gap", listOf(new Int64(), [[-1n, 0n, 0n], [0n], [], [0n]])));
  rejected("a gap of 2^62", "manifest-invalid", set("gap", listOf(new Int64(), [[1n << 62n, 0n, 0n], [0n], [], [0n]])));
  rejected("a negative dimension", "manifest-invalid", set("shape", listOf(new Int64(), [[-600n], [2n, 2n], [0n, 3n], []])));
  rejected("a product that wraps", "manifest-invalid", set("shape", listOf(new Int64(), [[600n], [1n << 32n, 1n << 32n], [0n, 3n], []])));
  rejected("an unknown dtype", "dtype-unknown", set("dtype", vectorFromArray(["U8", "F33", "F64", "I64"], new Utf8())));
  rejected("a name twice", "parts-disagree", set("name", vectorFromArray(["b", "b", "empty", "scalar"], new Utf8())));
  rejected("another root", "root-mismatch", set("name", vectorFromArray(["c", "a", "empty", "scalar"], new Utf8())));
  rejected("bytes of another block", "digest-mismatch", set("gap", listOf(new Int64(), [[8n, 0n, 0n], [0n], [], [0n]])));

  rejected("another format", "format-unknown", { meta: (m) => void (m["format"] = "deltaformat-manifest/2") });
  rejected("an unknown feature", "feature-unknown", { meta: (m) => void (m["requires"] = ["x"]) });
  rejected("another parent", "parts-disagree", { meta: (m) => void (m["parent"] = 0) });
  rejected("another block size", "parts-disagree", { meta: (m) => void (m["block_bytes"] = 512) });
  rejected("a key that is none", "value-invalid", { meta: (m) => void (m["packs"] = [{ key: "packs/x", size: 1 }]) });
  rejected("the key of an external copy", "value-invalid", { meta: (m) => void (m["packs"] = [{ key: `packs/external/${"0".repeat(64)}`, size: 1 }]) });
  rejected("one pack twice", "manifest-invalid", { meta: (m) => void (m["packs"] = [...(m["packs"] as []), ...(m["packs"] as [])]) });
  for (const path of ["../x", "/x", "a//b", "a/./b", "a\\b", "c:x", "a\u0085", "", `${"é".repeat(513)}`]) {
    rejected(`the path ${JSON.stringify(path).slice(0, 20)}`, "path-unsafe", { files: [{ path, content: Uint8Array.of(1) }] });
  }

  test("every byte of the Arrow file, changed: refused or read, never a crash", async () => {
    let plain = new Uint8Array();
    await opened({ manifest: (f) => (plain = f as Uint8Array<ArrayBuffer>) });
    for (let i = 0; i < plain.length; i++) {
      const changed = plain.slice();
      changed[i] ^= [0xff, 0x01, 0x80, 0x10][i % 4];
      await opened({ manifest: () => changed }).catch((e: { class?: string }) => assert.ok(e.class !== undefined, String(e)));
    }
  });

  test("a list of lists of names", async () => {
    await opened({ columns: (c) => void (c["deep"] = listOf(new List(new Field("x", new Utf8())), [[["a"], []], [], null, [["b", "c"]]])) });
  });
});
