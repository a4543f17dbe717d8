/** The zstd decoder against another one, and against damage. */
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { decompress } from "fzstd";
import { DeltaformatError } from "../src/index.js";
import { type Hashes, loadHashes } from "../src/hash.js";
import { decompressFrame } from "../src/zstd.js";
import { frameEnd, readFrameHeader } from "../src/zstdHeader.js";
import { sha256 } from "./builder.js";

/** Frames of several levels and contents, each with the SHA-256 of its content. */
const FRAMES = JSON.parse(readFileSync(fileURLToPath(new URL("../../test/frames.json", import.meta.url)), "utf8")) as {
  frame: string;
  sha256: string;
}[];

let hashes: Hashes;
before(async () => {
  hashes = await loadHashes();
});

function decode(frame: Uint8Array): Uint8Array | null {
  const header = readFrameHeader(frame);
  if (typeof header === "string" || header.contentSize > 1e7 || frameEnd(frame, header) !== frame.length) return null;
  return decompressFrame(frame, header, hashes);
}

test("frames of another compressor", () => {
  for (const { frame, sha256: hash } of FRAMES) {
    const bytes = new Uint8Array(Buffer.from(frame, "base64"));
    const content = decode(bytes)!;
    assert.equal(sha256(content), hash);
    if (content.length > 0) assert.equal(sha256(decompress(bytes)), hash);
  }
});

test("damaged frames are refused or decode to something of the stated size, soon", () => {
  let seed = 1;
  const random = (n: number): number => (seed = (seed * 48271) % 2147483647) % n;
  for (let i = 0; i < 3000; i++) {
    const bytes = new Uint8Array(Buffer.from(FRAMES[i % FRAMES.length].frame, "base64"));
    for (let j = random(4); j >= 0; j--) bytes[4 + random(bytes.length - 4)] ^= 1 << random(8);
    const began = performance.now();
    try {
      decode(bytes);
    } catch (e) {
      assert.ok(e instanceof DeltaformatError && e.code === "frame-corrupt", String(e));
    }
    assert.ok(performance.now() - began < 2000);
  }
});
