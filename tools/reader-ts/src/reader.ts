/** The reader of a store (SPEC 13). */
import { BlockReader } from "./blocks.js";
import { type Descriptor, parseDescriptor } from "./descriptor.js";
import { fail, isError } from "./errors.js";
import { type ExternalOptions, ExternalReader } from "./external.js";
import { advance, loadWhole, type Snapshot } from "./follow.js";
import { type Hashes, loadHashes } from "./hash.js";
import { DESCRIPTOR_KEY } from "./keys.js";
import { type Limits, makeLimits, within } from "./limits.js";
import { Log } from "./log.js";
import { loadContents } from "./parts.js";
import type { CommitRecord } from "./records.js";
import { ask, type At, resolve } from "./resolve.js";
import { type Store, wrapped } from "./store.js";
import { type Context, explainMissing, Version } from "./version.js";

export interface OpenOptions extends ExternalOptions {
  limits?: Partial<Limits>;
}

export interface BranchState {
  /** Null before the first commit. */
  readonly seq: number | null;
  readonly step: number | null;
  readonly epoch: number;
}

export interface StoreState {
  /** The newest record's number; null in a store without records. */
  readonly newest: number | null;
  readonly branches: Record<string, BranchState>;
  readonly tags: Record<string, number>;
}

/** Beyond this many versions, reading the wanted one whole costs less than going through those between. */
const MAX_PATH = 16;

export class StoreReader {
  private readonly context: Context;

  private constructor(
    private readonly store: Store,
    private readonly descriptor: Descriptor,
    private readonly log: Log,
    private readonly limits: Limits,
    private readonly hashes: Hashes,
    options: ExternalOptions,
  ) {
    this.context = {
      store,
      descriptor,
      blocks: new BlockReader(store, new ExternalReader(store, options), descriptor, limits, hashes),
      limits,
      hashes,
      retired: (seq) => ask(this.log, (history) => history.retired(seq)),
    };
  }

  static async open(given: Store, options: OpenOptions = {}): Promise<StoreReader> {
    const limits = makeLimits(options.limits);
    const hashes = await loadHashes();
    const store = wrapped(given);
    const bytes = await store.get(DESCRIPTOR_KEY, limits.descriptorBytes);
    if (bytes === null) fail("store-missing", "there is no descriptor");
    within(bytes.length, limits.descriptorBytes, "the descriptor");
    const descriptor = parseDescriptor(bytes, hashes);
    return new StoreReader(store, descriptor, new Log(store, limits, hashes), limits, hashes, options);
  }

  get uuid(): string {
    return this.descriptor.uuid;
  }

  get digest(): string {
    return this.descriptor.digest.name;
  }

  get blockBytes(): number {
    return this.descriptor.blockBytes;
  }

  /** Opens a version; reads records and manifests only (DF-RD-01). */
  async version(at: At): Promise<Version> {
    return this.openCommit(await resolve(this.log, at));
  }

  private openCommit(commit: CommitRecord): Promise<Version> {
    return explainMissing(this.context, commit.seq, async () => {
      const contents = await loadContents(this.store, this.descriptor, commit, this.limits, this.hashes);
      return new Version(this.context, commit, contents);
    });
  }

  /** A version with all its tensors, to begin following with. */
  load(version: Version): Promise<Snapshot> {
    return loadWhole(version, this.limits);
  }

  /**
   * The version asked for, from one that is held: by fresh pieces where it descends from that, whole otherwise. What is
   * held stays as it is (DF-RD-03).
   */
  async follow(held: Snapshot, at: At): Promise<Snapshot> {
    const wanted = await this.version(at);
    try {
      const path = await this.pathTo(wanted, held.version);
      if (path !== null) {
        let current = held;
        for (const version of path) {
          current = await advance(current, version, this.context.blocks, this.descriptor.blockBytes, this.limits);
        }
        return current;
      }
    } catch (e) {
      // A version on the way may have been collected.
      if (!isError(e, "object-missing", "version-retired")) throw e;
    }
    return this.load(wanted);
  }

  /** The versions after `from` up to `wanted`, oldest first, or null if `wanted` does not follow from it soon. */
  private async pathTo(wanted: Version, from: Version): Promise<Version[] | null> {
    const path: Version[] = [];
    let version = wanted;
    while (version.seq !== from.seq) {
      path.unshift(version);
      if (version.parent === null || version.depth <= from.depth || path.length > MAX_PATH) return null;
      if (version.parent === from.seq) return path;
      version = await this.version({ seq: version.parent });
    }
    return path;
  }

  state(): Promise<StoreState> {
    return ask(this.log, async (history) => ({
      newest: history.newest,
      branches: Object.fromEntries(
        [...history.state.heads].map(([name, { seq, step, epoch }]) => [name, { seq, step, epoch }]),
      ),
      tags: Object.fromEntries(await history.tags()),
    }));
  }
}
