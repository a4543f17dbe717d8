import { fileURLToPath } from "node:url";
import { DirectoryStore, readFileRange } from "./directoryStore.js";
import { type HttpOptions, type OpenOptions, openStore as openPlace, type Store, type StoreReader } from "./index.js";

export * from "./index.js";
export { DirectoryStore } from "./directoryStore.js";

/** Opens a store in a directory, at a URL, or one that is given as an object. */
export function openStore(place: string | URL | Store, options: OpenOptions & HttpOptions = {}): Promise<StoreReader> {
  const withFiles = { readFile: readFileRange, ...options };
  if (place instanceof URL && place.protocol === "file:") return openPlace(new DirectoryStore(fileURLToPath(place)), withFiles);
  if (typeof place === "string" && !/^https?:\/\//.test(place)) return openPlace(new DirectoryStore(place), withFiles);
  return openPlace(place, withFiles);
}
