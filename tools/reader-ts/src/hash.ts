import { createBLAKE3, createSHA256, createXXHash128, createXXHash64, type IHasher } from "hash-wasm";
import { fail, quote } from "./errors.js";

/**
 * The hash functions, made once. Each use is init, update, digest without a pause between them, so that one instance of
 * each serves all callers.
 */
export interface Hashes {
  sha256(...parts: Uint8Array[]): Uint8Array;
  /** A running SHA-256, for content that comes in blocks. */
  sha256Stream(): Promise<{ update(bytes: Uint8Array): void; hex(): string }>;
  xxh3(bytes: Uint8Array): Uint8Array;
  blake3(bytes: Uint8Array): Uint8Array;
  /** The low four bytes of XXH64, as a zstd frame's checksum has them (RFC 8878, 3.1.1). */
  zstdChecksum(bytes: Uint8Array): number;
}

let loading: Promise<Hashes> | undefined;

export function loadHashes(): Promise<Hashes> {
  loading ??= load();
  return loading;
}

function run(hasher: IHasher, parts: readonly Uint8Array[]): Uint8Array {
  hasher.init();
  for (const part of parts) hasher.update(part);
  return hasher.digest("binary");
}

async function load(): Promise<Hashes> {
  const [sha256, xxh3, xxh64, blake3] = await Promise.all([
    createSHA256(), createXXHash128(0, 0), createXXHash64(0, 0), createBLAKE3(256),
  ]);
  return {
    sha256: (...parts) => run(sha256, parts),
    sha256Stream: async () => {
      const own = await createSHA256();
      own.init();
      return { update: (bytes) => void own.update(bytes), hex: () => own.digest("hex") };
    },
    xxh3: (bytes) => run(xxh3, [bytes]),
    blake3: (bytes) => run(blake3, [bytes]),
    zstdChecksum: (bytes) => {
      const d = run(xxh64, [bytes]); // canonical (big-endian) order
      return ((d[4] << 24) | (d[5] << 16) | (d[6] << 8) | d[7]) >>> 0;
    },
  };
}

export interface Digest {
  readonly name: string;
  readonly bytes: number;
  of(block: Uint8Array): Uint8Array;
}

export const DIGESTS: readonly string[] = ["xxh3-128", "blake3-256"];

/** SPEC 7 */
export function digestNamed(name: string, hashes: Hashes): Digest {
  switch (name) {
    case "xxh3-128": return { name, bytes: 16, of: hashes.xxh3 };
    case "blake3-256": return { name, bytes: 32, of: hashes.blake3 };
    default: return fail("digest-unknown", `unknown digest ${quote(name)}`); // DF-DSC-02
  }
}

const HEX = Array.from({ length: 256 }, (_, i) => i.toString(16).padStart(2, "0"));

export function hex(bytes: Uint8Array): string {
  let text = "";
  for (const byte of bytes) text += HEX[byte];
  return text;
}

export function equalBytes(a: Uint8Array, b: Uint8Array): boolean {
  if (a.length !== b.length) return false;
  for (let i = 0; i < a.length; i++) if (a[i] !== b[i]) return false;
  return true;
}
