/** Reading over HTTP: the same versions, and no more bytes than needed. */
import assert from "node:assert/strict";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { fileURLToPath } from "node:url";
import { DeltaformatError, openStore } from "../src/node.js";
import { Builder, rawTensor, sha256 } from "./builder.js";
import { FileServer } from "./server.js";

const WORKED = fileURLToPath(new URL("../../../../conformance/cases/valid/worked-store/store", import.meta.url));
const BLOCK = 64 * 1024;
const BLOCKS = 64;

describe("over HTTP", () => {
  const directory = mkdtempSync(join(tmpdir(), "deltaformat-http-"));
  const content = new Uint8Array(BLOCK * BLOCKS).map((_, i) => (i * 7) ^ (i >> 9));
  let server: FileServer;

  before(async () => {
    const builder = await Builder.make(BLOCK);
    builder.claim();
    builder.commit({ step: 0, tensors: [rawTensor("w", "F32", [BLOCKS, BLOCK / 4], content, BLOCK)], files: [{ path: "empty", content: new Uint8Array(0) }] });
    builder.write(directory);
    server = await FileServer.start(directory);
  });

  after(async () => {
    await server.stop();
    rmSync(directory, { recursive: true });
  });

  test("the worked store", async () => {
    const worked = await FileServer.start(WORKED);
    try {
      const version = await (await openStore(worked.url)).version({ branch: "main" });
      assert.equal(version.root, "df1:xxh3-128:256:b031eb3b211c78da2c39351e8d170398087231b0d4034fc7fc7f17ee6cb9302a");
      const { bytes } = await version.getTensor("w");
      assert.equal(Buffer.from(bytes).toString("hex"), "803f81bf00000080c17ffe3b");
    } finally {
      await worked.stop();
    }
  });

  test("opening reads no pack, a slice reads only its blocks (DF-RD-01)", async () => {
    server.served.length = 0;
    const version = await (await openStore(server.url)).version({ branch: "main" });
    assert.equal(server.bytes("packs/") + server.bytes("files/"), 0);
    const slice = await version.getSlice("w", [[10, 12], [5, 9]]);
    assert.equal(server.bytes("packs/"), 2 * BLOCK);
    const row = (r: number) => content.subarray(r * BLOCK + 20, r * BLOCK + 36);
    assert.deepEqual(Buffer.from(slice.bytes), Buffer.concat([row(10), row(11)]));
    server.served.length = 0;
    const whole = await version.getTensor("w");
    assert.equal(sha256(whole.bytes), sha256(content));
    assert.equal(server.bytes("packs/"), content.length);
  });

  test("an object without bytes", async () => {
    const version = await (await openStore(server.url)).version({ branch: "main" });
    assert.equal((await version.readFile("empty")).length, 0);
  });

  test("a server without ranges", async () => {
    const plain = await FileServer.start(directory, { ranges: false });
    try {
      const version = await (await openStore(plain.url)).version({ branch: "main" });
      const slice = await version.getSlice("w", [[3, 4], [0, 1]]);
      assert.deepEqual(Buffer.from(slice.bytes), Buffer.from(content.subarray(3 * BLOCK, 3 * BLOCK + 4)));
    } finally {
      await plain.stop();
    }
  });

  test("a failure is not absence (DF-STO-04), and says nothing of the address (DF-SEC-02)", async () => {
    const failing = await FileServer.start(directory);
    try {
      failing.failing.set("log/00000000000000000002.json", 403);
      const url = new URL(failing.url);
      url.search = "?signature=secret";
      const store = await openStore(url, { headers: { authorization: "secret" } });
      await assert.rejects(store.version({ branch: "main" }), (e: DeltaformatError) => {
        assert.equal(e.class, "STORE");
        assert.ok(!e.message.includes("secret") && !e.message.includes("127.0.0.1"));
        return true;
      });
    } finally {
      await failing.stop();
    }
  });

  test("nothing at the address", async () => {
    await assert.rejects(openStore(`${server.url}nothing`), { code: "store-missing" });
  });

  test("a server that is not there", async () => {
    const gone = await FileServer.start(directory);
    const { url } = gone;
    await gone.stop();
    await assert.rejects(openStore(url), { class: "STORE" });
  });
});
