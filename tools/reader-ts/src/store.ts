import { DeltaformatError, fail } from "./errors.js";

/**
 * What a reader needs of a store (SPEC 5). `null` is absence and nothing else: every other failure is thrown
 * (DF-STO-04). What is thrown may hold secrets of the transport, so it never gets into a message (DF-SEC-02).
 */
export interface Store {
  /** The object, or its first `max + 1` bytes if it is longer than `max`. */
  get(key: string, max: number): Promise<Uint8Array | null>;
  /** Bytes [start, end) of the object; fewer if it ends before. */
  getRange(key: string, start: number, end: number): Promise<Uint8Array | null>;
}

/** A part of an object, and the size of the whole where that is known. */
export interface RangeOf {
  readonly bytes: Uint8Array;
  readonly size: number | null;
}

/** Turns whatever a store throws into STORE. */
export function wrapped(store: Store): Store {
  const attempt = async <T>(key: string, read: () => Promise<T>): Promise<T> => {
    try {
      return await read();
    } catch (e) {
      if (e instanceof DeltaformatError) throw e;
      return fail("store-failed", `the store failed to read ${key}`, e);
    }
  };
  return {
    get: (key, max) => attempt(key, () => store.get(key, max)),
    getRange: (key, start, end) => attempt(key, () => store.getRange(key, start, end)),
  };
}
