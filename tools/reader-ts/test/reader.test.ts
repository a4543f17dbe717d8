/** Slices, following, externals and limits. */
import assert from "node:assert/strict";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { describe, test } from "node:test";
import { pathToFileURL } from "node:url";
import { filePath, hfUrl, isPrefix } from "../src/external.js";
import { type AxisRange, openStore } from "../src/node.js";
import { type BlockSpec, Builder, raw, rawTensor, sha256 } from "./builder.js";
import { writeSparse } from "./sparseWriter.js";

const noise = (n: number): Uint8Array => new Uint8Array(n).map((_, i) => (i * 131) ^ (i >> 5));

/** The elements of a box, by their definition. */
function naiveSlice(content: Uint8Array, shape: number[], width: number, ranges: AxisRange[]): Uint8Array {
  let rows: Uint8Array[] = [content];
  let size = content.length;
  shape.forEach((dim, axis) => {
    size /= dim;
    rows = rows.flatMap((row) => {
      const [start, stop] = ranges[axis];
      return Array.from({ length: stop - start }, (_, i) => row.subarray((start + i) * size, (start + i + 1) * size));
    });
  });
  assert.equal(size, width);
  return Buffer.concat(rows);
}

describe("slices", () => {
  test("every box of small tensors", async () => {
    const builder = await Builder.make();
    builder.claim();
    const shapes = [[700], [20, 33], [5, 7, 19], [1, 300, 1], [3, 1, 2, 60]];
    const tensors = shapes.map((shape, i) => rawTensor(`t${i}`, "U16", shape, noise(2 * shape.reduce((a, b) => a * b)), 256));
    builder.commit({ step: 0, tensors: [...tensors, rawTensor("scalar", "U16", [], noise(2), 256)] });
    const version = await (await openStore(builder.store)).version({ branch: "main" });
    let seed = 7;
    const random = (n: number): number => (seed = (seed * 48271) % 2147483647) % n;
    for (let i = 0; i < 400; i++) {
      const which = i % shapes.length;
      const shape = shapes[which];
      const ranges = shape.map((dim): AxisRange => {
        const start = random(dim + 1);
        return random(3) === 0 ? [0, dim] : [start, start + random(dim - start + 1)];
      });
      const { bytes, shape: got } = await version.getSlice(`t${which}`, ranges);
      assert.deepEqual(got, ranges.map(([a, b]) => b - a));
      const content = noise(2 * shape.reduce((a, b) => a * b));
      assert.deepEqual(Buffer.from(bytes), Buffer.from(naiveSlice(content, shape, 2, ranges)), JSON.stringify([shape, ranges]));
    }
    assert.equal((await version.getSlice("scalar", [])).bytes.length, 2);
    const wrong: AxisRange[][] = [[], [[0, 701]], [[-1, 2]], [[3, 2]], [[0, 1.5]], [[0, 1], [0, 1]]];
    for (const ranges of wrong) {
      await assert.rejects(version.getSlice("t0", ranges), { code: "input-invalid" });
    }
    await assert.rejects(version.getSlice("t9", []), { code: "tensor-missing" });
  });

  test("elements of four bits: whole bytes only", async () => {
    const builder = await Builder.make();
    builder.claim();
    builder.commit({ step: 0, tensors: [rawTensor("f", "F4", [4, 6], noise(12), 256)] });
    const version = await (await openStore(builder.store)).version({ branch: "main" });
    assert.deepEqual(Buffer.from((await version.getSlice("f", [[1, 3], [2, 4]])).bytes), Buffer.from([noise(12)[4], noise(12)[7]]));
    await assert.rejects(version.getSlice("f", [[0, 4], [1, 3]]), { code: "not-supported" });
  });

  test("a broken block elsewhere does no harm", async () => {
    const builder = await Builder.make();
    builder.claim();
    const tensor = rawTensor("w", "U8", [1024], noise(1024), 256);
    tensor.blocks[1].pieces[0].payload = noise(256).fill(1);
    builder.commit({ step: 0, tensors: [tensor] });
    const version = await (await openStore(builder.store)).version({ branch: "main" });
    assert.equal((await version.getSlice("w", [[512, 1024]])).bytes.length, 512);
    assert.equal((await version.getSlice("w", [[300, 300]])).bytes.length, 0);
    await assert.rejects(version.getSlice("w", [[511, 513]]), { code: "digest-mismatch" });
  });
});

function changed(base: BlockSpec, at: number): BlockSpec {
  const content = base.content.slice();
  content[at] ^= 5;
  const payload = writeSparse(base.content, content, { width: 1, thresholds: [], ks: [2] });
  return { content, pieces: [...base.pieces, { encoding: 3, payload }], fresh: 1 };
}

describe("following", () => {
  async function twoSteps(): Promise<{ builder: Builder; contents: Uint8Array[] }> {
    const builder = await Builder.make();
    builder.claim();
    const first = rawTensor("w", "U8", [768], noise(768), 256);
    builder.commit({ step: 0, tensors: [first, rawTensor("gone", "U8", [4], noise(4), 256)] });
    const contents = [noise(768)];
    let blocks = first.blocks;
    for (let step = 1; step < 4; step++) {
      blocks = blocks.map((block, i) => (i === step % 3 ? changed(block, 10 + step) : { ...block, fresh: 0 }));
      builder.commit({ step, tensors: [{ ...first, blocks }, { ...rawTensor("new", "U8", [4], noise(4), 256) }] });
      contents.push(Buffer.concat(blocks.map((b) => b.content)));
    }
    return { builder, contents };
  }

  test("by fresh pieces, over one step and over several (DF-RD-02)", async () => {
    const { builder, contents } = await twoSteps();
    const store = await openStore(builder.store);
    const held = await store.load(await store.version({ branch: "main", step: 0 }));
    const before = sha256(held.tensors.get("w")!);
    builder.store.asked.length = 0;
    const next = await store.follow(held, { branch: "main", step: 1 });
    const fetched = builder.store.asked.filter(({ key }) => key.startsWith("packs/"));
    // Two short pieces, and the unchanged block between them, which costs less than a request.
    assert.ok(fetched.reduce((sum, { start, end }) => sum + end - start, 0) < 400);
    assert.deepEqual(Buffer.from(next.tensors.get("w")!), Buffer.from(contents[1]));
    assert.deepEqual([...next.tensors.keys()], ["new", "w"]);
    const last = await store.follow(held, { branch: "main" });
    assert.deepEqual(Buffer.from(last.tensors.get("w")!), Buffer.from(contents[3]));
    assert.equal(sha256(held.tensors.get("w")!), before);
    assert.equal((await store.follow(last, { branch: "main" })).version.step, 3);
    assert.deepEqual(Buffer.from((await store.follow(last, { seq: 1 })).tensors.get("w")!), Buffer.from(contents[0]));
  });

  test("what is held and has changed is not built upon", async () => {
    const { builder, contents } = await twoSteps();
    const store = await openStore(builder.store);
    const held = await store.load(await store.version({ branch: "main", step: 0 }));
    held.tensors.get("w")![0] ^= 1;
    const next = await store.follow(held, { branch: "main", step: 1 });
    assert.deepEqual(Buffer.from(next.tensors.get("w")!), Buffer.from(contents[1]));
  });

  test("fresh values that contradict the parent (DF-MAN-08)", async () => {
    for (const block of [{ ...raw(noise(256).fill(9)), fresh: 0 }, { ...raw(noise(100)), fresh: 0 }]) {
      const builder = await Builder.make();
      builder.claim();
      builder.commit({ step: 0, tensors: [rawTensor("w", "U8", [256], noise(256), 256)] });
      builder.commit({ step: 1, tensors: [{ name: "w", dtype: "U8", shape: [block.content.length], blocks: [block] }] });
      const store = await openStore(builder.store);
      const held = await store.load(await store.version({ branch: "main", step: 0 }));
      await assert.rejects(store.follow(held, { branch: "main" }), { code: "manifest-invalid" });
      assert.deepEqual(Buffer.from(held.tensors.get("w")!), Buffer.from(noise(256)));
    }
  });
});

describe("external objects", () => {
  async function withExternal(url: string): Promise<Builder> {
    const builder = await Builder.make();
    builder.claim();
    const blocks = [{ content: noise(256), pieces: [{ encoding: 0, payload: noise(256), external: { url } }] }];
    builder.commit({ step: 0, tensors: [{ name: "w", dtype: "U8", shape: [256], blocks }] });
    return builder;
  }
  const copyKey = `packs/external/${sha256(noise(256))}`;

  test("a file URL where it is allowed; the store's copy otherwise (DF-EXT-03)", async () => {
    const directory = mkdtempSync(join(tmpdir(), "deltaformat-external-"));
    try {
      const file = join(directory, "a b");
      writeFileSync(file, noise(256));
      const builder = await withExternal(pathToFileURL(file).href);
      const prefix = `${pathToFileURL(directory).href}/`;
      const read = async (allow: string[]): Promise<Uint8Array> =>
        (await (await (await openStore(builder.store, { allow })).version({ branch: "main" })).getTensor("w")).bytes;
      assert.deepEqual(await read([prefix]), noise(256));
      await assert.rejects(read([]), { code: "external-refused", class: "UNSAFE" });
      writeFileSync(file, noise(256).fill(1));
      await assert.rejects(read([prefix]), { code: "digest-mismatch" });
      writeFileSync(file, noise(100));
      await assert.rejects(read([prefix]), { code: "size-mismatch" });
      rmSync(file);
      await assert.rejects(read([prefix]), { code: "object-missing" });
      builder.store.objects.set(copyKey, noise(256));
      assert.deepEqual(await read([]), noise(256));
      assert.deepEqual(await read([prefix]), noise(256));
      writeFileSync(file, noise(256).fill(1));
      assert.deepEqual(await read([prefix]), noise(256));
    } finally {
      rmSync(directory, { recursive: true });
    }
  });

  test("hf objects are fetched by commit, without the store's headers (DF-EXT-02)", async () => {
    const url = `hf://name/repo@${"a".repeat(40)}/dir/w 1.safetensors`;
    const builder = await withExternal(url);
    const asked: { url: string; headers: Headers }[] = [];
    const fetcher = (async (input: URL, init: RequestInit) => {
      asked.push({ url: String(input), headers: new Headers(init.headers) });
      return new Response(noise(256) as Uint8Array<ArrayBuffer>, { status: 206 });
    }) as typeof fetch;
    const store = await openStore(builder.store, { hfEndpoint: "https://hub.test", fetch: fetcher, headers: { authorization: "x" } });
    assert.equal((await (await store.version({ branch: "main" })).getTensor("w")).bytes.length, 256);
    assert.equal(asked[0].url, `https://hub.test/name/repo/resolve/${"a".repeat(40)}/dir/w%201.safetensors`);
    assert.equal(asked[0].headers.get("authorization"), null);
  });

  test("which URLs are allowed", () => {
    assert.ok(isPrefix("https://a.test/x/", "https://a.test/x/y"));
    assert.ok(isPrefix("https://a.test/x", "https://a.test/x"));
    assert.ok(!isPrefix("https://a.test/x", "https://a.test/xy"));
    assert.ok(!isPrefix("https://a.test", "https://a.test@b.test/"));
    assert.ok(!isPrefix("", "https://a.test/"));
    const commit = "0".repeat(40);
    for (const bad of [
      `hf://n/r@${commit}/../x`, `hf://n/r@${commit}/a//b`, `hf://n/r@${commit}/a?b`, `hf://n/r@${commit}/a%2fb`, `hf://n/r@${commit}/`,
      `hf://n/r@main/a`, `hf://.n/r@${commit}/a`, `hf://n/r/s@${commit}/a`, `hf://n/r@${commit}/a\nb`,
    ]) assert.equal(hfUrl(bad, "https://hub.test"), null, bad);
    for (const bad of ["file:///a/../b", "file:///a/%2e%2e/b", "file:///a%2fb", "file://host/a", "file:///a%zz", "file:///a%00", "file:a"]) {
      assert.throws(() => filePath(bad), { code: "external-refused" }, bad);
    }
    assert.equal(filePath("file:///a%20b/c"), "/a b/c");
    assert.equal(filePath("file:/a"), "/a");
  });
});

describe("limits", () => {
  test("are checked before memory is taken, and cannot be raised beyond the format's (DF-LIM-01)", async () => {
    const builder = await Builder.make();
    builder.claim();
    builder.commit({ step: 0, tensors: [rawTensor("w", "U8", [1024], noise(1024), 256), rawTensor("v", "U8", [1], noise(1), 256)] });
    const cases = [
      { descriptorBytes: 100 }, { recordBytes: 100 }, { recordContainers: 2 }, { manifestBytes: 1000 }, { manifestParts: 0 },
      { manifestBytesTotal: 1000 }, { tensors: 1 }, { packs: 0 }, { metadataBytes: 100 }, { metadataContainers: 4 }, { packBytes: 1000 }, { branches: 0 }, { columns: 10 },
      { blockMemory: 500 }, { resultBytes: 1000 },
    ];
    for (const limits of cases) {
      const read = async () => (await (await openStore(builder.store, { limits })).version({ branch: "main" })).getTensor("w");
      await assert.rejects(read(), { code: "limit-exceeded" }, JSON.stringify(limits));
    }
    await assert.rejects(openStore(builder.store, { limits: { columns: -1 } }), { code: "input-invalid" });
  });

  test("blake3-256", async () => {
    const builder = await Builder.make(256, "blake3-256");
    builder.claim();
    builder.commit({ step: 0, tensors: [rawTensor("w", "U8", [600], noise(600), 256)] });
    const version = await (await openStore(builder.store)).version({ branch: "main" });
    assert.match(version.root, /^df1:blake3-256:256:/);
    assert.deepEqual((await version.getTensor("w")).bytes, noise(600));
  });
});
