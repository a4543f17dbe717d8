/**
 * The one record batch of an Arrow IPC file (DF-MAN-01), with every buffer checked against the file before it is looked
 * at. Only the layout is read here; what the columns must be is in columns.ts.
 */
import { DeltaformatError, fail } from "./errors.js";
import { FlatTable, readI64 } from "./flatbuf.js";
import { equalBytes } from "./hash.js";
import { decodeUtf8 } from "./json.js";
import { within } from "./limits.js";

export function badManifest(message: string): never {
  return fail("manifest-invalid", `manifest part: ${message}`);
}

/** Type ids of Arrow's Schema.fbs. */
export const ArrowType = { Int: 2, Utf8: 5, List: 12, FixedSizeBinary: 15 } as const;
const UNION = 14;
const VIEWS = [23, 24];
/** Buffers of each type's own level, children not counted; views have more, a union's depend on its mode. */
const BUFFERS: Readonly<Record<number, number>> = {
  1: 0, 2: 2, 3: 2, 4: 3, 5: 3, 6: 2, 7: 2, 8: 2, 9: 2, 10: 2, 11: 2, 12: 2, 13: 1, 15: 2, 16: 1, 17: 2, 18: 2, 19: 3,
  20: 3, 21: 2, 22: 0, 23: 2, 24: 2, 25: 3, 26: 3,
};
const VERSION_5 = 4;
const RECORD_BATCH = 3;
const MAGIC = "ARROW1";
/** Not in SPEC 16: more than 4,096 columns have, unless views are cut into very many buffers. */
const MAX_BUFFERS = 65_536;

export interface ArrowField {
  readonly name: string | null;
  readonly typeId: number;
  /** Int: bit width. FixedSizeBinary: byte width. Union: mode. */
  readonly parameter: number;
  readonly signed: boolean;
  readonly children: readonly ArrowField[];
}

export interface ArrowArray {
  readonly field: ArrowField;
  readonly length: number;
  readonly nullCount: number;
  readonly buffers: readonly Uint8Array[];
  readonly children: readonly ArrowArray[];
}

export interface ArrowFile {
  /** The values of the schema's custom metadata under this key. */
  metadata(key: string): Uint8Array[];
  /** Reads the columns; the metadata can be judged before. */
  columns(maxColumns: number): { rows: number; columns: ArrowArray[] };
}

function guarded<T>(read: () => T): T {
  try {
    return read();
  } catch (e) {
    if (e instanceof DeltaformatError) throw e;
    if (e instanceof RangeError) badManifest("not a valid Arrow file");
    throw e;
  }
}

function isMagic(bytes: Uint8Array): boolean {
  return String.fromCharCode(...bytes) === MAGIC;
}

function noMetadata(table: FlatTable, id: number, what: string): void {
  if (table.vector(id, 4).length > 0) badManifest(`${what} has custom metadata`);
}

export function openArrow(file: Uint8Array): ArrowFile {
  return guarded(() => {
    const size = file.length;
    if (size < 8 + 10 || !isMagic(file.subarray(0, 6)) || !isMagic(file.subarray(size - 6))) badManifest("not an Arrow file");
    const view = new DataView(file.buffer, file.byteOffset, size);
    const footerLength = view.getInt32(size - 10, true);
    const footerAt = size - 10 - footerLength;
    if (footerLength <= 0 || footerAt < 8) badManifest("the Arrow footer is not within the file");
    const footer = FlatTable.root(new DataView(file.buffer, file.byteOffset + footerAt, footerLength));
    if (footer.i16(0) !== VERSION_5) badManifest("the metadata version is not V5");
    const schema = footer.table(1);
    if (schema === null) badManifest("the Arrow footer has no schema");
    if (schema.i16(0) !== 0) badManifest("not little-endian");
    if (footer.vector(2, 24).length > 0) badManifest("there are dictionaries");
    noMetadata(footer, 4, "the footer");
    return {
      metadata: (key) => guarded(() => {
        const wanted = new TextEncoder().encode(key);
        const values: Uint8Array[] = [];
        for (const entry of schema.eachTable(2)) if (equalBytes(entry.bytes(0), wanted)) values.push(entry.bytes(1));
        return values;
      }),
      columns: (maxColumns) => guarded(() => {
        const fields = readFields(schema, maxColumns);
        return readBatch(view, footerAt, footer, fields);
      }),
    };
  });
}

/** FlatBuffers may share one long string among many fields, so only names that could matter are decoded. */
function shortName(bytes: Uint8Array): string | null {
  return bytes.length <= 16 ? decodeUtf8(bytes) : null;
}

function readFields(schema: FlatTable, maxColumns: number): ArrowField[] {
  let count = 0;
  const read = (table: FlatTable): ArrowField => {
    within(++count, maxColumns, "columns of a manifest part");
    noMetadata(table, 6, "a field");
    if (table.table(4) !== null) badManifest("a column is dictionary-encoded");
    const typeId = table.u8(2);
    const type = table.table(3);
    if (type === null || (typeId !== UNION && BUFFERS[typeId] === undefined)) badManifest("a column of an unknown type");
    return {
      name: shortName(table.bytes(0)),
      typeId,
      parameter: typeId === UNION ? type.i16(0) : type.i32(0),
      signed: type.u8(1) !== 0,
      children: childTables(table, 5).map(read),
    };
  };
  const childTables = (table: FlatTable, id: number): FlatTable[] => {
    within(count + table.vector(id, 4).length, maxColumns, "columns of a manifest part");
    return [...table.eachTable(id)];
  };
  return childTables(schema, 1).map(read);
}

function readBatch(
  view: DataView, footerAt: number, footer: FlatTable, fields: readonly ArrowField[],
): { rows: number; columns: ArrowArray[] } {
  const blocks = footer.vector(3, 24);
  if (blocks.length !== 1) badManifest(`${blocks.length} record batches`);
  const offset = readI64(footer.view, blocks.start);
  const metadataLength = footer.view.getInt32(blocks.start + 8, true);
  const bodyLength = readI64(footer.view, blocks.start + 16);
  if (offset < 8 || metadataLength < 8 || bodyLength < 0 || offset + metadataLength + bodyLength > footerAt) {
    badManifest("the record batch is not within the file");
  }
  if (offset % 8 !== 0 || metadataLength % 8 !== 0 || bodyLength % 8 !== 0) badManifest("the record batch is not aligned");
  if (view.getUint32(offset, true) !== 0xffffffff) badManifest("the record batch has no continuation mark");
  const messageLength = view.getInt32(offset + 4, true);
  if (messageLength <= 0 || messageLength > metadataLength - 8) badManifest("the message is not within the file");
  const message = FlatTable.root(new DataView(view.buffer, view.byteOffset + offset + 8, messageLength));
  if (message.i16(0) !== VERSION_5) badManifest("the metadata version is not V5");
  noMetadata(message, 4, "the message");
  const batch = message.table(2);
  if (message.u8(1) !== RECORD_BATCH || batch === null) badManifest("the message is not a record batch");
  if (message.i64(3) !== bodyLength) badManifest("message and footer state different lengths");
  if (batch.table(3) !== null) badManifest("buffers are compressed");
  const body = new Uint8Array(view.buffer, view.byteOffset + offset + metadataLength, bodyLength);
  const rows = batch.i64(0);
  const columns = new Layout(batch, body).arrays(fields);
  for (const column of columns) if (column.length !== rows) badManifest("a column's length is not the batch's");
  return { rows, columns };
}

/** Hands out the batch's nodes and buffers in the order of Arrow's pre-order walk over the fields. */
class Layout {
  private readonly nodes: { start: number; length: number };
  private readonly buffers: Uint8Array[];
  private readonly variadic: { start: number; length: number };
  private node = 0;
  private buffer = 0;
  private view = 0;

  constructor(private readonly batch: FlatTable, body: Uint8Array) {
    this.nodes = batch.vector(1, 16);
    this.buffers = readBuffers(batch, body);
    this.variadic = batch.vector(4, 8);
  }

  arrays(fields: readonly ArrowField[]): ArrowArray[] {
    const arrays = fields.map((field) => this.array(field));
    if (this.node !== this.nodes.length || this.buffer !== this.buffers.length || this.view !== this.variadic.length) {
      badManifest("the record batch does not fit its schema");
    }
    return arrays;
  }

  private array(field: ArrowField): ArrowArray {
    if (this.node >= this.nodes.length) badManifest("the record batch does not fit its schema");
    const at = this.nodes.start + 16 * this.node++;
    const length = readI64(this.batch.view, at);
    const nullCount = readI64(this.batch.view, at + 8);
    if (length < 0 || length > Number.MAX_SAFE_INTEGER || nullCount < 0 || nullCount > length) {
      badManifest("a column's length is not valid");
    }
    const count = this.bufferCount(field);
    if (this.buffer + count > this.buffers.length) badManifest("the record batch does not fit its schema");
    const buffers = this.buffers.slice(this.buffer, this.buffer + count);
    this.buffer += count;
    return { field, length, nullCount, buffers, children: field.children.map((child) => this.array(child)) };
  }

  private bufferCount(field: ArrowField): number {
    if (field.typeId === UNION) return field.parameter === 0 ? 1 : 2;
    if (!VIEWS.includes(field.typeId)) return BUFFERS[field.typeId];
    if (this.view >= this.variadic.length) badManifest("the record batch does not fit its schema");
    const more = readI64(this.batch.view, this.variadic.start + 8 * this.view++);
    if (more < 0 || more > this.buffers.length) badManifest("the record batch does not fit its schema");
    return BUFFERS[field.typeId] + more;
  }
}

function readBuffers(batch: FlatTable, body: Uint8Array): Uint8Array[] {
  const { start, length } = batch.vector(2, 16);
  within(length, MAX_BUFFERS, "buffers of a record batch");
  const extents: { from: number; to: number }[] = [];
  for (let i = 0; i < length; i++) {
    const from = readI64(batch.view, start + 16 * i);
    const size = readI64(batch.view, start + 16 * i + 8);
    if (from < 0 || size < 0 || from + size > body.length) badManifest("a buffer is not within the body");
    extents.push({ from, to: from + size });
  }
  const sorted = extents.filter((e) => e.to > e.from).sort((a, b) => a.from - b.from);
  for (let i = 1; i < sorted.length; i++) if (sorted[i].from < sorted[i - 1].to) badManifest("buffers overlap");
  return extents.map((e) => body.subarray(e.from, e.to));
}
