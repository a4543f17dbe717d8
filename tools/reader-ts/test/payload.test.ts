/** Payloads from bytes made by hand (SPEC 9). */
import assert from "node:assert/strict";
import { before, describe, test } from "node:test";
import { decodePiece } from "../src/blocks.js";
import { type Hashes, loadHashes } from "../src/hash.js";
import { bytesOf } from "./builder.js";
import { elements, stored, varint, writeSparse } from "./sparseWriter.js";

let hashes: Hashes;
before(async () => {
  hashes = await loadHashes();
});

const decode = (encoding: number, payload: Uint8Array, length: number, base: Uint8Array | null = null): Uint8Array =>
  decodePiece(encoding, payload, base, length, hashes);
const hexOf = (bytes: Uint8Array): string => Buffer.from(bytes).toString("hex");

function rejects(code: string, encoding: number, payload: Uint8Array | string, length: number, base: Uint8Array | null = null): void {
  const bytes = typeof payload === "string" ? bytesOf(payload) : payload;
  assert.throws(() => decode(encoding, bytes, length, base), { code }, hexOf(bytes));
}

/** Repeatable noise. */
function noise(n: number, seed: number): Uint8Array {
  let x = seed * 2654435761 + 1;
  return new Uint8Array(n).map(() => {
    x ^= x << 13;
    x ^= x >>> 17;
    x ^= x << 5;
    return x;
  });
}

describe("raw and planes", () => {
  test("raw has the block's length (DF-ENC-04)", () => {
    assert.equal(hexOf(decode(0, bytesOf("0102"), 2)), "0102");
    rejects("payload-invalid", 0, "0102", 3);
  });

  test("planes: stored and constant streams", () => {
    // w = 2: low bytes stored, high bytes 3f three times
    assert.equal(hexOf(decode(1, bytesOf("01 00 010203 01 3f"), 6)), "013f023f033f");
  });

  test("planes-delta adds modulo 2^(8w), with carries, for every width", () => {
    for (const [log, width] of [1, 2, 4, 8].entries()) {
      const base = noise(width * 50, width);
      const delta = noise(width * 50, width + 9);
      const planes = Array.from({ length: width }, (_, j) => stored(Array.from({ length: 50 }, (_, i) => delta[i * width + j])));
      const out = decode(2, Uint8Array.from([log, ...planes.flat()]), base.length, base);
      const modulus = 1n << BigInt(8 * width);
      const expected = elements(base, width).map((x, i) => (x + elements(delta, width)[i]) % modulus);
      assert.deepEqual(elements(out, width), expected);
    }
  });

  test("rejects", () => {
    rejects("encoding-unknown", 1, "04 00 01", 1); // reserved bit
    rejects("payload-invalid", 1, "01 00 01 00 01", 3); // no multiple of w
    rejects("payload-invalid", 1, "00 00 0102 03", 2); // left over
    rejects("payload-invalid", 1, "00 00 01", 2); // cut short
    rejects("payload-invalid", 1, "00", 2);
    rejects("payload-invalid", 1, "", 2);
    rejects("payload-invalid", 1, "00 8000 0102", 2); // varint not shortest
    rejects("payload-invalid", 1, "00 808080808000 01", 2); // varint of six bytes
    rejects("payload-invalid", 1, "00 8080808010 01", 2); // 2^32
  });
});

describe("zstd frames in streams (DF-ENC-09)", () => {
  const head = "28b52ffd";
  const stream = (frame: string): string => `00 ${Buffer.from(varint(bytesOf(frame).length)).toString("hex")} ${frame}`;
  const block = "110000 0102"; // last, stored, two bytes

  test("single segment, with and without a checksum", () => {
    assert.equal(hexOf(decode(1, bytesOf(stream(`${head} 20 02 ${block}`)), 2)), "0102");
    const sum = hashes.zstdChecksum(bytesOf("0102"));
    const bytes = Buffer.alloc(4);
    bytes.writeUInt32LE(sum);
    assert.equal(hexOf(decode(1, bytesOf(stream(`${head} 24 02 ${block} ${bytes.toString("hex")}`)), 2)), "0102");
    rejects("frame-corrupt", 1, stream(`${head} 24 02 ${block} 00000000`), 2);
  });

  test("a dictionary id of 0 is none", () => {
    assert.equal(hexOf(decode(1, bytesOf(stream(`${head} 21 00 02 ${block}`)), 2)), "0102");
    rejects("payload-invalid", 1, stream(`${head} 21 01 02 ${block}`), 2);
  });

  test("headers that are MALFORMED", () => {
    for (const frame of [
      `29b52ffd 20 02 ${block}`, // magic number
      `502a4d18 02000000 0102`, // skippable
      `${head} 20 03 ${block}00`, // another content size
      `${head} 00 00 ${block}`, // no content size
      `${head} 28 02 ${block}`, // reserved bit
      `${head} a0 02`, // cut short in the content size
      `${head} 80 90 02000000 ${block}`, // window of 256 MiB
      `${head} c0 f8 0200000000000000 ${block}`, // window of 2^41
      `${head} 20 02 ${block} 00`, // a byte after the frame
      `${head} 20 02 ${block} ${head} 20 00 010000`, // two frames
    ]) rejects("payload-invalid", 1, stream(frame), 2);
  });

  test("frames that are CORRUPT", () => {
    for (const frame of [
      `${head} 20 02 110000 01`, // cut short
      `${head} 20 02 100000 0102`, // no last block
      `${head} 20 02 0b0000 01`, // one byte
      `${head} 20 02 190000 010203`, // three bytes
      `${head} 20 02 170000 0102`, // reserved block type
    ]) rejects("frame-corrupt", 1, stream(frame), 2);
  });

  test("a window of 128 MiB is allowed", () => {
    assert.equal(hexOf(decode(1, bytesOf(stream(`${head} 80 88 02000000 ${block}`)), 2)), "0102");
  });
});

describe("sparse", () => {
  const base = bytesOf("803f 80bf 0000 0080 c17f 003c");

  test("the worked payload", () => {
    const payload = bytesOf("05 003e 01 01 00 01 00 0101 00 00 00 02 00 0001 01 00");
    assert.equal(hexOf(decode(3, payload, 12, base)), "803f81bf00000080c17ffe3b");
  });

  test("random changes: every width, strata with ties, escapes", () => {
    for (const width of [1, 2, 4, 8]) {
      for (let seed = 1; seed <= 30; seed++) {
        const n = 1200;
        const old = noise(n * width, seed * 8 + width);
        // Ties: a quarter of the elements equal the first.
        for (let p = 0; p < n; p += 4) old.copyWithin(p * width, 0, width);
        const next = old.slice();
        const every = [1, 3, 40, 600][seed % 4];
        for (let p = seed % every; p < n; p += every) next.set(noise(width, p * 31 + seed), p * width);
        const maximum = (1n << BigInt(8 * width - 1)) - 1n;
        const first = elements(old, width)[0] & maximum;
        const choices = [[], [first], [first + 1n], [maximum, first + 1n, first, 1n]];
        const thresholds = choices[seed % choices.length].filter((t, i, all) => t >= 1n && t <= maximum && (i === 0 || t < all[i - 1]));
        const ks = Array.from({ length: thresholds.length + 1 }, (_, i) => (seed + i * 5) % 8 === 0 ? 26 : (seed + i) % 5);
        const payload = writeSparse(old, next, { width, thresholds, ks });
        assert.deepEqual(decode(3, payload, old.length, old), next, `width ${width}, seed ${seed}`);
      }
    }
  });

  test("extreme differences", () => {
    for (const width of [1, 2, 4, 8]) {
      const zero = new Uint8Array(width);
      const log = Math.log2(width);
      // |d| - 1, a constant stream per plane.
      const payload = (sign: number, magnitude: bigint): Uint8Array => {
        const planes = Array.from({ length: width }, (_, j) => [1, Number((magnitude >> BigInt(8 * j)) & 255n)]);
        return Uint8Array.from([log, 1, 0, 1, 0, 1, sign, ...planes.flat()]);
      };
      const maximum = (1n << BigInt(8 * width - 1)) - 1n;
      assert.equal(hexOf(decode(3, payload(1, maximum), width, zero)), "00".repeat(width - 1) + "80");
      assert.equal(hexOf(decode(3, payload(0, maximum - 1n), width, zero)), "ff".repeat(width - 1) + "7f");
      rejects("payload-invalid", 3, payload(0, maximum), width, zero);
      rejects("payload-invalid", 3, payload(1, maximum + 1n), width, zero);
    }
  });

  test("rejects", () => {
    const old = new Uint8Array(8);
    const good = "00 02 00 00 0001 01 00 01 00";
    assert.equal(hexOf(decode(3, bytesOf(good), 8, old)), "0100010000000000");
    for (const bad of [
      "00 00", // no change (DF-ENC-11)
      "00 09 00 01 00 01 00 01 00 01 00", // more changes than elements
      "00 02 1b 00 0001 01 00 01 00 01 00", // k of 27 (DF-ENC-12)
      "00 01 00 00 ff 00 fe000000 01 00 01 00", // an escape below 255 (DF-ENC-13)
      "00 01 03 01 00 00 08 01 00 01 00", // padding of the low bits (DF-ENC-14)
      "00 02 00 00 0001 01 04 01 00", // padding of the signs
      "00 02 00 00 0007 01 00 01 00", // rank 8 (DF-ENC-15)
      "00 01 1a 00 ff 00 ffffffff 01 00 01 00 01 00", // a gap of 2^58
      "04 00 01 00 00 01 01 00 01 00 01 00", // threshold 0 (DF-ENC-10)
      "04 80 01 00 00 01 00 01 00 01 00", // threshold above M
      "08 05 05 01 00 00 00 01 00 01 00 01 00", // thresholds that do not fall
      "04 01 01 00 00 01 00 01 00 01 00", // the outer stratum is empty: all magnitudes are below 1
      `${good} 00`, // left over
      "00 02 00 00 0001 01 00", // magnitudes missing
    ]) rejects("payload-invalid", 3, bad, 8, old);
    rejects("encoding-unknown", 3, "40", 8, old);
    rejects("encoding-unknown", 3, "80", 8, old);
    rejects("payload-invalid", 3, "01 01 00 01 00 01 00 01 00 01 00", 7, new Uint8Array(7));
    assert.deepEqual(old, new Uint8Array(8)); // the base is as it was (DF-ENC-17)
  });
});
