/** One version of a store, opened: its manifests have been read and its root checked; no block has been read. */
import { type BlockReader, type Wanted } from "./blocks.js";
import type { Descriptor } from "./descriptor.js";
import { fail, isError, quote } from "./errors.js";
import type { Hashes } from "./hash.js";
import { type PlainJson, toPlain } from "./json.js";
import { type Limits, within } from "./limits.js";
import type { Tensor } from "./manifest.js";
import type { FileEntry } from "./manifestMeta.js";
import { type Contents, getVerified } from "./parts.js";
import type { CommitRecord } from "./records.js";
import { type AxisRange, checkRanges, Runs, SliceCopier } from "./slice.js";
import type { Store } from "./store.js";

export interface TensorInfo {
  readonly name: string;
  readonly dtype: string;
  readonly shape: readonly number[];
  readonly nbytes: number;
}

export interface TensorData {
  readonly dtype: string;
  readonly shape: readonly number[];
  /** Canonical bytes (SPEC 8.2). */
  readonly bytes: Uint8Array;
}

export interface FileInfo {
  readonly path: string;
  readonly size: number;
  readonly sha256: string;
}

/** What a version shares with its store. */
export interface Context {
  readonly store: Store;
  readonly descriptor: Descriptor;
  readonly blocks: BlockReader;
  readonly limits: Limits;
  readonly hashes: Hashes;
  retired(seq: number): Promise<boolean>;
}

export class Version {
  private readonly byName: ReadonlyMap<string, Tensor>;
  private readonly byPath: ReadonlyMap<string, FileEntry>;

  constructor(private readonly context: Context, private readonly commit: CommitRecord, contents: Contents) {
    this.byName = new Map(contents.tensors.map((tensor) => [tensor.name, tensor]));
    this.byPath = new Map(contents.files.map((file) => [file.path, file]));
  }

  get seq(): number {
    return this.commit.seq;
  }

  get step(): number {
    return this.commit.step;
  }

  get root(): string {
    return this.commit.root;
  }

  /** The seq of the commit before this one in its lineage. */
  get parent(): number | null {
    return this.commit.parent;
  }

  get depth(): number {
    return this.commit.depth;
  }

  get metadata(): PlainJson {
    return toPlain(this.commit.metadata);
  }

  /** In the order of the names as UTF-8 byte strings. */
  names(): string[] {
    return [...this.byName.keys()];
  }

  info(name: string): TensorInfo {
    const { dtype, shape, nbytes } = this.tensor(name);
    return { name, dtype, shape: [...shape], nbytes };
  }

  files(): FileInfo[] {
    return [...this.byPath.values()].map(({ path, size, sha256 }) => ({ path, size, sha256 }));
  }

  tensor(name: string): Tensor {
    const tensor = this.byName.get(name);
    if (tensor === undefined) fail("tensor-missing", `no tensor ${quote(name)}`);
    return tensor;
  }

  find(name: string): Tensor | undefined {
    return this.byName.get(name);
  }

  async getTensor(name: string): Promise<TensorData> {
    const tensor = this.tensor(name);
    within(tensor.nbytes, this.context.limits.resultBytes, "size of a tensor");
    const bytes = allocate(tensor.nbytes);
    let at = 0;
    await this.readBlocks([name], (block) => {
      bytes.set(block, at);
      at += block.length;
    });
    return { dtype: tensor.dtype, shape: [...tensor.shape], bytes };
  }

  /**
   * Visits the canonical bytes of tensors, one after the other, block by block, without holding them all. Copy what is
   * kept. Pieces of neighbours are fetched together.
   */
  async readBlocks(names: Iterable<string>, visit: (block: Uint8Array, name: string) => void): Promise<void> {
    const tensors = [...names].map((name) => this.tensor(name));
    await this.read(allBlocks(tensors), (bytes, { tensor }) => visit(bytes, tensor.name));
  }

  /** Reads only the blocks that hold a part of the slice (DF-RD-01). */
  async getSlice(name: string, ranges: readonly AxisRange[]): Promise<TensorData> {
    const tensor = this.tensor(name);
    checkRanges(tensor, ranges);
    const runs = new Runs(tensor, ranges);
    within(runs.bytes, this.context.limits.resultBytes, "size of a slice");
    const { blockBytes } = this.context.descriptor;
    const copier = new SliceCopier(runs, allocate(runs.bytes));
    await this.read(someBlocks(tensor, runs.blocks(blockBytes)), (bytes, block) => copier.block(block.index * blockBytes, bytes));
    return { dtype: tensor.dtype, shape: ranges.map(([start, stop]) => stop - start), bytes: copier.out };
  }

  async readFile(path: string): Promise<Uint8Array> {
    const file = this.byPath.get(path);
    if (file === undefined) fail("file-missing", `no file ${quote(path)}`);
    const { store, limits, hashes } = this.context;
    return this.guarded(() => getVerified(store, file.key, file.size, file.sha256, limits.resultBytes, hashes));
  }

  read(wanted: Iterable<Wanted>, visit: (bytes: Uint8Array, block: Wanted) => void): Promise<void> {
    return this.guarded(() => this.context.blocks.read(wanted, visit));
  }

  private guarded<T>(read: () => Promise<T>): Promise<T> {
    return explainMissing(this.context, this.seq, read);
  }
}

/** DF-GC-05: an object of a retired commit is missing because it was collected. */
export async function explainMissing<T>(context: Context, seq: number, read: () => Promise<T>): Promise<T> {
  try {
    return await read();
  } catch (e) {
    if (isError(e, "object-missing") && (await context.retired(seq))) fail("version-retired", `the version at seq ${seq} was collected`, e);
    throw e;
  }
}

export function allocate(size: number): Uint8Array {
  try {
    return new Uint8Array(size);
  } catch (e) {
    if (e instanceof RangeError) fail("limit-exceeded", `no memory for ${size} bytes`);
    throw e;
  }
}

function* allBlocks(tensors: readonly Tensor[]): Generator<Wanted> {
  for (const tensor of tensors) for (let index = 0; index < tensor.blocks; index++) yield { tensor, index };
}

function* someBlocks(tensor: Tensor, indices: Iterable<number>): Generator<Wanted> {
  for (const index of indices) yield { tensor, index };
}
