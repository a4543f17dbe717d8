import { type HttpOptions, HttpStore } from "./httpStore.js";
import { type OpenOptions, StoreReader } from "./reader.js";
import type { Store } from "./store.js";

export { DeltaformatError, type ErrorClass, type ErrorCode } from "./errors.js";
export { type HttpOptions, HttpStore } from "./httpStore.js";
export { DEFAULT_LIMITS, type Limits } from "./limits.js";
export { type OpenOptions, StoreReader, type BranchState, type StoreState } from "./reader.js";
export type { At } from "./resolve.js";
export type { Snapshot } from "./follow.js";
export type { AxisRange } from "./slice.js";
export type { Store } from "./store.js";
export { type FileInfo, type TensorData, type TensorInfo, Version } from "./version.js";

/** Opens a store at an HTTP or HTTPS URL, or one that is given as an object. */
export function openStore(place: string | URL | Store, options: OpenOptions & HttpOptions = {}): Promise<StoreReader> {
  const isAddress = typeof place === "string" || place instanceof URL;
  return StoreReader.open(isAddress ? new HttpStore(place, options) : place, options);
}
