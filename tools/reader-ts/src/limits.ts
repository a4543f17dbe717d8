import { fail } from "./errors.js";

const KiB = 1024;
const MiB = 1024 * KiB;
const GiB = 1024 * MiB;

/** What a reader refuses with LIMIT (SPEC 16). */
export interface Limits {
  descriptorBytes: number;
  recordBytes: number;
  recordContainers: number;
  manifestBytes: number;
  manifestParts: number;
  manifestBytesTotal: number;
  tensors: number;
  packs: number;
  metadataBytes: number;
  metadataContainers: number;
  packBytes: number;
  branches: number;
  columns: number;
  /** Memory for one block: its content and its pieces. 0 stands for 66 × block_bytes, but at least 64 MiB. */
  blockMemory: number;
  /** The largest tensor, slice or sidecar file that is returned whole. */
  resultBytes: number;
}

/** DF-LIM-01: the numbers a reader must accept. */
export const DEFAULT_LIMITS: Readonly<Limits> = {
  descriptorBytes: 64 * KiB,
  recordBytes: 16 * MiB,
  recordContainers: 131_072,
  manifestBytes: 256 * MiB,
  manifestParts: 4096,
  manifestBytesTotal: 4 * GiB,
  tensors: 1_000_000,
  packs: 65_536,
  metadataBytes: 64 * MiB,
  metadataContainers: 262_144,
  packBytes: 16 * GiB,
  branches: 1000,
  columns: 1024,
  blockMemory: 0,
  resultBytes: 4 * GiB,
};

/** DF-LIM-01: the numbers above which a reader must refuse, whatever its user asks for. */
export const CEILINGS = {
  descriptorBytes: 64 * KiB,
  recordBytes: 16 * MiB,
  recordContainers: 262_144,
  manifestBytes: GiB,
  manifestParts: 4096,
  manifestBytesTotal: 4 * GiB,
  tensors: 16_777_216,
  packs: 1_048_576,
  metadataBytes: 128 * MiB,
  metadataContainers: 4_194_304,
  packBytes: 1024 * GiB,
  branches: 10_000,
  columns: 4096,
} as const satisfies Partial<Limits>;

export const MAX_CHAIN = 64;
export const MAX_RANK = 32;
export const MAX_NAME_BYTES = 65_535;
export const MAX_SAFE = Number.MAX_SAFE_INTEGER;

export function makeLimits(user: Partial<Limits> | undefined): Limits {
  const limits: Limits = { ...DEFAULT_LIMITS };
  for (const name of Object.keys(DEFAULT_LIMITS) as (keyof Limits)[]) {
    const value = user?.[name];
    if (value === undefined) continue;
    if (!Number.isSafeInteger(value) || value < 0) fail("input-invalid", `limit ${name} is not a number of things`);
    limits[name] = Math.min(value, (CEILINGS as Partial<Limits>)[name] ?? MAX_SAFE);
  }
  return limits;
}

/** DF-LIM-02: called with a declared size, before memory is taken for it. */
export function within(value: number, limit: number, what: string): void {
  if (value > limit) fail("limit-exceeded", `${what}: ${value} is above the limit of ${limit}`);
}
