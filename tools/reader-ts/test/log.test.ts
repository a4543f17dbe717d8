/** The log: validity, folds, tags, steps and hints (SPEC 12). */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { openStore, type StoreReader } from "../src/index.js";
import { recordKey } from "../src/keys.js";
import { Builder, type Members, rawTensor } from "./builder.js";

const tensors = (step: number) => [rawTensor("w", "U8", [4], new Uint8Array(4).fill(step), 256)];

async function withSteps(...steps: number[]): Promise<Builder> {
  const builder = await Builder.make();
  builder.claim();
  for (const step of steps) builder.commit({ step, tensors: tensors(step) });
  return builder;
}

const stepOf = async (store: StoreReader, at: object): Promise<number> => (await store.version(at)).step;

describe("the log", () => {
  test("every step of a long lineage, in few records (DF-LOG-08)", async () => {
    const steps = Array.from({ length: 70 }, (_, i) => 3 * i + 1);
    const builder = await withSteps(...steps);
    for (const step of [1, 4, 100, 205, 208]) {
      const store = await openStore(builder.store);
      builder.store.asked.length = 0;
      assert.equal(await stepOf(store, { branch: "main", step }), step);
      assert.ok(new Set(builder.store.askedOf("log/")).size <= 40);
    }
    const store = await openStore(builder.store);
    for (const step of steps) assert.equal(await stepOf(store, { branch: "main", step }), step);
    for (const step of [0, 2, 99, 209, 1e9]) await assert.rejects(store.version({ branch: "main", step }), { code: "version-missing" });
  });

  test("hints that are stale, false, too high or not valid (DF-LOG-09)", async () => {
    const builder = await withSteps(0, 1, 2);
    for (const hint of ['{"seq":3}', '{"seq":1}', '{"seq":400}', '{"seq":9007199254740991}', '{"seq":-1}', "{", "", '{"seq":1.5}', "x".repeat(70000)]) {
      builder.store.objects.set("hints/tail.json", new TextEncoder().encode(hint));
      assert.equal((await (await openStore(builder.store)).state()).newest, 3);
    }
  });

  test("a store without records", async () => {
    const builder = await Builder.make();
    const store = await openStore(builder.store);
    assert.deepEqual(await store.state(), { newest: null, branches: {}, tags: {} });
    await assert.rejects(store.version({ branch: "main" }), { code: "branch-missing" });
    builder.claim();
    await assert.rejects(store.version({ branch: "main" }), { code: "version-missing" });
  });

  test("a void record changes nothing, also as the newest (DF-LOG-04)", async () => {
    const builder = await withSteps(0, 1);
    // A fenced writer's commit, and then a drop of a branch that does not exist.
    const [, , last] = [0, 1, 2].map((seq) => JSON.parse(Buffer.from(builder.store.objects.get(recordKey(seq))!).toString()) as Members);
    const { check: _check, prev: _prev, seq: _seq, nonce: _nonce, kind, ...rest } = last;
    const voidSeq = builder.record(kind as string, rest, false);
    assert.equal(await stepOf(await openStore(builder.store), { branch: "main" }), 1);
    builder.record("drop", { branch: "other" }, false);
    const store = await openStore(builder.store);
    assert.equal(await stepOf(store, { branch: "main" }), 1);
    await assert.rejects(store.version({ seq: voidSeq }), { code: "record-void", class: "INCONSISTENT" });
    await assert.rejects(store.version({ seq: voidSeq + 1 }), { code: "version-missing" });
    await assert.rejects(store.version({ seq: 99 }), { code: "version-missing" });
    builder.commit({ step: 2, tensors: tensors(2) });
    assert.equal(await stepOf(store, { branch: "main" }), 2);
    assert.equal((await store.state()).newest, voidSeq + 2);
  });

  test("heads that do not follow make a record void", async () => {
    const builder = await withSteps(0);
    builder.record("tag", { name: "t", target: 1 }, false, (record) => void (record["heads"] = {}));
    const store = await openStore(builder.store);
    assert.deepEqual((await store.state()).tags, {});
    assert.deepEqual(Object.keys((await store.state()).branches), ["main"]);
  });

  test("tags: the newest of a name counts, null removes", async () => {
    const builder = await withSteps(0, 1);
    builder.record("tag", { name: "best", target: 1 });
    builder.record("tag", { name: "old", target: 1 });
    builder.record("tag", { name: "best", target: 2 });
    builder.record("tag", { name: "old", target: null });
    const store = await openStore(builder.store);
    assert.deepEqual((await store.state()).tags, { best: 2 });
    assert.equal(await stepOf(store, { tag: "best" }), 1);
    await assert.rejects(store.version({ tag: "old" }), { code: "tag-missing" });
    await assert.rejects(store.version({ tag: "none" }), { code: "tag-missing" });
  });

  test("rewind, fork and drop", async () => {
    const builder = await withSteps(0, 1, 2); // seq 1, 2, 3
    builder.claim("main", 1);
    builder.commit({ step: 5, tensors: tensors(5) });
    const store = await openStore(builder.store);
    assert.equal(await stepOf(store, { branch: "main" }), 5);
    await assert.rejects(store.version({ branch: "main", step: 2 }), { code: "version-missing" }); // DF-LOG-07
    assert.equal(await stepOf(store, { seq: 3 }), 2);
    builder.fork("side", 2);
    assert.equal(await stepOf(store, { branch: "side" }), 1);
    builder.drop("main");
    await assert.rejects(store.version({ branch: "main" }), { code: "branch-missing" });
    assert.deepEqual((await store.state()).branches, { side: { seq: 2, step: 1, epoch: 0 } });
  });

  test("a commit's faults make it void", async () => {
    const faults: Record<string, (record: Members) => void> = {
      ancestors: (r) => void (r["ancestors"] = []),
      depth: (r) => void (r["depth"] = 5),
      claim: (r) => void (r["claim"] = 1),
      step: (r) => void (r["step"] = 0),
      parent: (r) => void (r["parent"] = null),
      last_tag: (r) => void (r["last_tag"] = 1),
      objects_added: (r) => void (r["objects_added"] = [{ key: `files/${"1".repeat(20)}/${"0".repeat(64)}`, size: 1 }]),
    };
    for (const [name, record] of Object.entries(faults)) {
      const builder = await withSteps(0);
      builder.commit({ step: 1, tensors: tensors(1), record });
      const store = await openStore(builder.store);
      assert.equal(await stepOf(store, { branch: "main" }), 0, name);
      await assert.rejects(store.version({ seq: 2 }), { code: "record-void" }, name);
    }
  });

  test("a retired version whose objects are gone (DF-GC-05)", async () => {
    const builder = await withSteps(0, 1);
    builder.record("retire", { commits: [1] });
    const store = await openStore(builder.store);
    assert.equal(await stepOf(store, { seq: 1 }), 0);
    const keys = [...builder.store.objects.keys()].filter((key) => key.startsWith("manifests/"));
    builder.store.objects.delete(keys[0]);
    await assert.rejects(store.version({ seq: 1 }), { code: "version-retired" });
    builder.store.objects.delete(keys[1]);
    await assert.rejects(store.version({ seq: 2 }), { code: "object-missing" });
  });

  test("records that are refused", async () => {
    const faults: [string, (record: Members) => void][] = [
      ["record-misplaced", (r) => void (r["seq"] = 7)],
      ["chain-broken", (r) => void (r["prev"] = "0".repeat(64))],
      ["chain-broken", (r) => void (r["prev"] = null)],
      ["format-unknown", (r) => void (r["kind"] = "merge")],
      ["feature-unknown", (r) => void (r["requires"] = ["x"])],
      ["value-invalid", (r) => void (r["branch"] = "-")],
      ["value-invalid", (r) => void (r["manifests"] = [])],
      ["json-invalid", (r) => void (r["step"] = 1.5)],
      ["json-invalid", (r) => void delete r["metadata"]],
    ];
    for (const [code, record] of faults) {
      const builder = await withSteps(0);
      builder.commit({ step: 1, tensors: tensors(1), record });
      await assert.rejects((await openStore(builder.store)).version({ branch: "main" }), { code });
    }
  });

  test("a changed byte is CORRUPT, an ending that is not there MALFORMED (DF-JSN-03)", async () => {
    const builder = await withSteps(0);
    const bytes = builder.store.objects.get(recordKey(1))!;
    const changed = bytes.slice();
    changed[20] ^= 1;
    builder.store.objects.set(recordKey(1), changed);
    await assert.rejects((await openStore(builder.store)).version({ branch: "main" }), { code: "hash-mismatch" });
    builder.store.objects.set(recordKey(1), bytes.subarray(0, -1));
    await assert.rejects((await openStore(builder.store)).version({ branch: "main" }), { code: "json-invalid" });
  });
});
