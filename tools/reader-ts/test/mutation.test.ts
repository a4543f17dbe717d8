/** Any changed byte of a store: the version is refused, or it is what it was. */
import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { DeltaformatError, openStore } from "../src/index.js";
import { MemoryStore } from "./memoryStore.js";

const WORKED = fileURLToPath(new URL("../../../../conformance/cases/valid/worked-store/store", import.meta.url));
const ROOT = "df1:xxh3-128:256:b031eb3b211c78da2c39351e8d170398087231b0d4034fc7fc7f17ee6cb9302a";
const store = new MemoryStore();

before(() => {
  const files = readdirSync(WORKED, { recursive: true, withFileTypes: true }).filter((entry) => entry.isFile());
  for (const { path, name } of files) {
    const file = join(path, name);
    store.objects.set(file.slice(WORKED.length + 1), new Uint8Array(readFileSync(file)));
  }
});

/** What a whole read gives; null if it is refused. Anything but a refusal is thrown. */
async function read(): Promise<{ root: string; w: string } | null> {
  try {
    const version = await (await openStore(store)).version({ branch: "main" });
    for (const { path } of version.files()) await version.readFile(path);
    await version.getTensor("b");
    return { root: version.root, w: Buffer.from((await version.getTensor("w")).bytes).toString("hex") };
  } catch (e) {
    if (e instanceof DeltaformatError) return null;
    throw e;
  }
}

test("changed, cut and lengthened objects of the worked store", async () => {
  const whole = { root: ROOT, w: "803f81bf00000080c17ffe3b" };
  assert.deepEqual(await read(), whole);
  let refused = 0;
  for (const [key, bytes] of [...store.objects]) {
    const variants = [bytes.subarray(0, -1), bytes.subarray(0, 0), Buffer.concat([bytes, Uint8Array.of(0)])];
    for (let i = 0; i < bytes.length; i += 5) {
      const changed = bytes.slice();
      changed[i] ^= 1 << (i % 8);
      variants.push(changed);
    }
    for (const variant of variants) {
      store.objects.set(key, variant);
      const found = await read();
      if (found === null) refused++;
      else assert.deepEqual(found, whole, key);
    }
    store.objects.delete(key);
    await read();
    store.objects.set(key, bytes);
  }
  assert.ok(refused > 500);
});
