import { type FileHandle, open } from "node:fs/promises";
import { join } from "node:path";
import type { RangeOf, Store } from "./store.js";

/** A store in a directory (Node only). */
export class DirectoryStore implements Store {
  constructor(private readonly directory: string) {}

  get(key: string, max: number): Promise<Uint8Array | null> {
    return this.getRange(key, 0, max + 1);
  }

  async getRange(key: string, start: number, end: number): Promise<Uint8Array | null> {
    return (await readFileRange(join(this.directory, key), start, end))?.bytes ?? null;
  }
}

/** Bytes [start, end) of a file; fewer if it is shorter, null if there is none. */
export async function readFileRange(path: string, start: number, end: number): Promise<RangeOf | null> {
  let handle: FileHandle;
  try {
    handle = await open(path, "r");
  } catch (e) {
    if (isAbsence(e)) return null;
    throw e;
  }
  try {
    const { size } = await handle.stat();
    const bytes = new Uint8Array(Math.max(0, Math.min(size, end) - start));
    let got = 0;
    while (got < bytes.length) {
      const { bytesRead } = await handle.read(bytes, got, bytes.length - got, start + got);
      if (bytesRead === 0) break;
      got += bytesRead;
    }
    return { bytes: bytes.subarray(0, got), size };
  } finally {
    await handle.close();
  }
}

function isAbsence(e: unknown): boolean {
  const code = (e as NodeJS.ErrnoException).code;
  return code === "ENOENT" || code === "ENOTDIR";
}
