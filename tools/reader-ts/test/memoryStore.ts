import type { Store } from "../src/index.js";

/** A store in memory that tells what was asked of it. */
export class MemoryStore implements Store {
  readonly objects = new Map<string, Uint8Array>();
  readonly asked: { key: string; start: number; end: number }[] = [];

  async get(key: string, max: number): Promise<Uint8Array | null> {
    return this.getRange(key, 0, max + 1);
  }

  async getRange(key: string, start: number, end: number): Promise<Uint8Array | null> {
    this.asked.push({ key, start, end });
    return this.objects.get(key)?.slice(start, end) ?? null;
  }

  askedOf(prefix: string): string[] {
    return this.asked.filter(({ key }) => key.startsWith(prefix)).map(({ key }) => key);
  }
}
