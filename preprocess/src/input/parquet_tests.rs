//! Columns of Parquet, written by the reference library.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use std::fs::File;
use std::sync::Arc;

use ::parquet::basic::Compression;
use ::parquet::data_type::{ByteArray, ByteArrayType, Int32Type};
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use ::parquet::schema::parser::parse_message_type;

use super::parquet::check_compression;
use super::*;
use crate::batch::document_batch::{BatchEnd, DocumentBatch};

/// Writes rows in groups; a row may have no text.
fn write(path: &std::path::Path, groups: &[&[Option<&str>]]) {
    write_with(path, Compression::SNAPPY, groups);
}

fn write_with(path: &std::path::Path, compression: Compression, groups: &[&[Option<&str>]]) {
    let schema = "message m { required int32 id; optional binary text (UTF8); }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let properties = WriterProperties::builder().set_compression(compression).build();
    let file = File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, Arc::new(properties)).unwrap();
    for rows in groups {
        let mut group = writer.next_row_group().unwrap();
        write_group(&mut group, rows);
        group.close().unwrap();
    }
    writer.close().unwrap();
}

fn write_group(group: &mut SerializedRowGroupWriter<'_, File>, rows: &[Option<&str>]) {
    let ids: Vec<i32> = (0..).take(rows.len()).collect();
    let levels: Vec<i16> = rows.iter().map(|row| i16::from(row.is_some())).collect();
    let texts: Vec<_> = rows.iter().flatten().map(|text| ByteArray::from(*text)).collect();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<Int32Type>().write_batch(&ids, None, None).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(&texts, Some(&levels), None).unwrap();
    column.close().unwrap();
}

/// Texts, and after how many rows each batch continued.
fn cut(chunker: InputChunker) -> (Vec<String>, Vec<(usize, Position)>, u64) {
    let mut chunker = chunker;
    let (mut texts, mut places, mut lines) = (Vec::new(), Vec::new(), 0);
    let mut batch = DocumentBatch::default();
    loop {
        batch.reset();
        if !chunker.fill(&mut batch) {
            return (texts, places, lines);
        }
        assert!(batch.stop.is_none(), "{:?}", batch.stop);
        let mut records = Records::new(&batch.shape, &batch.bytes, &batch.spans, batch.offset);
        for record in records.by_ref().filter(|record| !record.is_blank) {
            texts.push(String::from_utf8(record.bytes.to_vec()).unwrap());
        }
        lines += records.lines_before();
        places.push((texts.len(), batch.next));
    }
}

#[test]
fn a_column_is_read_from_any_row() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.parquet");
    let many = vec![Some("again"); 300];
    write(&path, &[&[Some("one"), None, Some(""), Some("二")], &[], &many, &[Some("last")]]);
    let names = [path.display().to_string()];
    let inputs = expand(&names, &InputOptions::default(), "text").unwrap();
    for block_bytes in [1, 64, 1 << 20] {
        let chunker = || InputChunker::new(inputs.clone(), block_bytes, 1000);
        let (texts, places, lines) = cut(chunker());
        assert_eq!(texts.len(), 304);
        assert_eq!(
            (&texts[..3], texts[303].as_str()),
            (&["one", "", "二"].map(String::from)[..], "last")
        );
        assert_eq!(lines, 305);
        for (before, place) in places {
            assert_eq!(cut(chunker().start_at(place)).0, texts[before..], "{place:?}");
        }
    }
}

#[test]
fn missing_or_invalid_columns_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.parquet");
    write(&path, &[&[Some("one")]]);
    let names = [path.display().to_string()];
    let message =
        |column| expand(&names, &InputOptions::default(), column).unwrap_err().to_string();
    assert!(message("body").contains("found only columns id, text"), "{}", message("body"));
    assert!(message("id").contains("values of INT32"), "{}", message("id"));
    let bytes = std::fs::read(&path).unwrap();
    for len in 4..bytes.len() {
        std::fs::write(&path, &bytes[..len]).unwrap();
        assert!(message("text").contains("may be truncated"), "{len}: {}", message("text"));
    }
    // A changed byte may go unnoticed, but nothing may panic or hang.
    for at in 4..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 0x40;
        std::fs::write(&path, changed).unwrap();
        let Ok(inputs) = expand(&names, &InputOptions::default(), "text") else { continue };
        let mut chunker = InputChunker::new(inputs, 64, 1000);
        let mut batch = DocumentBatch::default();
        while chunker.fill(&mut batch) && !matches!(batch.stop, Some(BatchEnd::Input(_))) {
            batch.reset();
        }
    }
}

/// A changed byte of a page with a CRC-32 was once read as another text.
#[test]
fn a_page_with_another_checksum_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.parquet");
    let mut bytes = include_bytes!("../../tests/golden/parquet/checksum.parquet").to_vec();
    std::fs::write(&path, &bytes).unwrap();
    let names = [path.display().to_string()];
    let chunker = || {
        let inputs = expand(&names, &InputOptions::default(), "text").unwrap();
        InputChunker::new(inputs, 64, 1000)
    };
    let texts = cut(chunker()).0;
    assert!(texts.len() == 6 && texts[3] == "row 3 of a column with checksums", "{texts:?}");
    let at = bytes.windows(5).position(|window| window == b"row 3").unwrap();
    bytes[at + 4] = b'9';
    std::fs::write(&path, &bytes).unwrap();
    let mut batch = DocumentBatch::default();
    chunker().fill(&mut batch);
    let Some(BatchEnd::Input(error)) = batch.stop else { panic!("{:?}", batch.stop) };
    let message = error.to_string();
    assert!(message.contains("CRC") && message.contains("was damaged"), "{message}");
}

/// The footer of a file names the codec of each column.
#[test]
fn pages_without_a_decoder_are_refused_by_name() {
    for (compression, name) in [
        (Compression::BROTLI(Default::default()), "pages in brotli"),
        (Compression::LZO, "pages in LZO"),
    ] {
        let message = check_compression("a.parquet", compression).unwrap_err().to_string();
        assert!(message.contains(name) && message.contains("hint: write it again"), "{message}");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.parquet");
    let names = [path.display().to_string()];
    for compression in [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::GZIP(Default::default()),
        Compression::ZSTD(Default::default()),
        Compression::LZ4,
        Compression::LZ4_RAW,
    ] {
        write_with(&path, compression, &[&[Some("one"), Some("two")]]);
        let inputs = expand(&names, &InputOptions::default(), "text").unwrap();
        let texts = cut(InputChunker::new(inputs, 64, 1000)).0;
        assert_eq!(texts, ["one", "two"], "{compression}");
    }
}
