//! Token files of other programs: read, written, refused.

use crate::common;
use std::sync::Arc;

use crate::common::{Dice, golden, key, manifest, read, temp_store};
use indexed::{
    Builder, Census, Dtype, Error, Format, FormatRule, IndexedDataset, MissingDocumentEnds,
    ReadOptions, Result, Sink, TokenSource, WriteOptions, Writer,
};
use storage::testing::fault_store::{FaultPlan, FaultStore};
use storage::{Key, Storage};

/// Documents of sequences of ids.
pub type Documents = Vec<Vec<Vec<i64>>>;

/// A sink that retains everything.
#[derive(Debug)]
struct Collect {
    dtype: Dtype,
    documents: Documents,
    open: Vec<Vec<i64>>,
    sequence: Vec<i64>,
}

impl Sink for Collect {
    fn tokens(&mut self, bytes: &[u8]) -> Result<()> {
        let mut ids = vec![0; bytes.len() / self.dtype.item_bytes() as usize];
        self.dtype.decode_i64(bytes, &mut ids);
        self.sequence.extend(ids);
        Ok(())
    }

    fn end_sequence(&mut self, _mode: i8) -> Result<()> {
        self.open.push(std::mem::take(&mut self.sequence));
        Ok(())
    }

    fn end_document(&mut self) -> Result<()> {
        self.documents.push(std::mem::take(&mut self.open));
        Ok(())
    }
}

pub fn collect(source: &TokenSource) -> Result<Documents> {
    let (dtype, documents, open, sequence) = (source.dtype(), vec![], vec![], vec![]);
    let mut sink = Collect { dtype, documents, open, sequence };
    source.read_into(&mut sink)?;
    assert!(sink.open.is_empty() && sink.sequence.is_empty(), "something was not ended");
    Ok(sink.documents)
}

/// Detects the format and reads the files.
pub fn read_any(store: &Arc<dyn Storage>, name: &str, options: &ReadOptions) -> Result<Documents> {
    let (format, prefix) = Format::detect(store, &key(name))?.expect("a format");
    collect(&TokenSource::open(store, &prefix, format, options)?)
}

fn write(
    store: &Arc<dyn Storage>,
    name: &str,
    format: Format,
    source: &TokenSource,
) -> Result<indexed::WriteReport> {
    let options = WriteOptions::default();
    let mut writer = Writer::create(store, &key(name), format, source, &options)?;
    source.read_into(&mut writer)?;
    writer.finish()
}

/// A pair with these documents.
fn pair(store: &Arc<dyn Storage>, name: &str, dtype: Dtype, documents: &Documents) -> TokenSource {
    let mut builder = Builder::create(store, &key(name), dtype).unwrap();
    for document in documents {
        for sequence in document {
            let ids: Vec<u32> = sequence.iter().map(|&id| id as u32).collect();
            builder.add_sequence(&ids).unwrap();
        }
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
    TokenSource::open(store, &key(name), Format::Mmididx, &ReadOptions::default()).unwrap()
}

fn copy(from: &dyn Storage, name: &str, to: &dyn Storage) {
    storage::write_all(to, &key(name), &read(from, name)).unwrap();
}

/// The three items of the goldens, as documents of 1 and of 2 sequences.
fn legacy_documents() -> Documents {
    vec![vec![vec![1, 2, 3]], vec![vec![4, 5], vec![6]]]
}

#[test]
fn tntidx_is_read_in_all_layouts() {
    let store = golden("legacy");
    for name in ["tntidx_i32", "tntidx_i32_paddle_int32sizes", "tntidx_i32.bin"] {
        let found = read_any(&store, name, &ReadOptions::default()).unwrap();
        assert_eq!(found, legacy_documents(), "{name}");
    }
    // The layout of fairseq has no document index and no field for it.
    let (_guard, here) = temp_store();
    let idx = read(store.as_ref(), "tntidx_i32.idx");
    let fairseq = [&idx[..48], &idx[56..56 + 64 + 24]].concat();
    storage::write_all(here.as_ref(), &key("f.idx"), &fairseq).unwrap();
    let bin = read(store.as_ref(), "tntidx_i32.bin");
    storage::write_all(here.as_ref(), &key("f.bin"), &bin).unwrap();
    let expected = legacy_documents().into_iter().flatten().map(|sequence| vec![sequence]);
    let found = read_any(&here, "f", &ReadOptions::default()).unwrap();
    assert_eq!(found, expected.collect::<Documents>());
}

#[test]
fn paddle_is_read_and_written_byte_for_byte() {
    let store = golden("legacy");
    for name in ["paddle", "paddle_ids.npy", "paddle_idx.npz"] {
        let found = read_any(&store, name, &ReadOptions::default()).unwrap();
        assert_eq!(found, legacy_documents(), "{name}");
    }
    let (_guard, here) = temp_store();
    // The format cannot represent an empty document or an empty sentence.
    let mut documents = legacy_documents();
    documents.insert(1, vec![]);
    documents[2].push(vec![]);
    let source = pair(&here, "a", Dtype::U16, &documents);
    let written = write(&here, "paddle", Format::Paddle, &source).unwrap();
    assert_eq!((written.documents, written.documents_dropped, written.sequences), (2, 1, 3));
    for name in ["paddle_ids.npy", "paddle_idx.npz"] {
        assert_eq!(read(here.as_ref(), name), read(store.as_ref(), name), "{name}");
    }
}

#[test]
fn cpm2_documents_are_read_from_three_files() {
    let store = golden("cpm2");
    let expected: Vec<i64> = common::numbers(&manifest("cpm2", "manifest.json")["document"]);
    let (format, prefix) = Format::detect(&store, &key("demo_document")).unwrap().unwrap();
    assert_eq!(format, Format::Cpm2);
    let source = TokenSource::open(&store, &prefix, format, &ReadOptions::default()).unwrap();
    assert_eq!(source.cpm2_vocab_size().unwrap(), Some(26_240));
    assert_eq!(collect(&source).unwrap(), [[expected.clone()]]);
    // One of them alone has no document ends.
    let part = key("demo_document_context");
    let refused =
        TokenSource::open(&store, &part, Format::Mmididx, &ReadOptions::default()).unwrap();
    let error = collect(&refused).unwrap_err();
    assert!(matches!(error, Error::Malformed { fault: FormatRule::NoDocumentEnds, .. }), "{error}");
    let options =
        ReadOptions { unended: MissingDocumentEnds::EachSequence, ..ReadOptions::default() };
    let context = TokenSource::open(&store, &part, Format::Mmididx, &options).unwrap();
    assert_eq!(collect(&context).unwrap()[0][0].len(), 9);
    // Together they convert to a pair.
    let (_guard, here) = temp_store();
    write(&here, "plain", Format::Mmididx, &source).unwrap();
    let dataset = IndexedDataset::open(&here, &key("plain")).unwrap();
    assert_eq!((dataset.document_count(), dataset.read_sequence(0).unwrap()), (1, expected));
}

#[test]
fn cpm2_files_that_disagree_are_refused() {
    let from = golden("cpm2");
    let names = ["context", "target", "target_offset"];
    let changes: [(&str, usize, u8); 8] = [
        ("context.bin", 6, 0x81),    // the first marker is the second
        ("context.bin", 0, 0x80),    // no longer a marker
        ("target.bin", 0, 0x81),     // another vocabulary
        ("target.bin", 6, 0x82),     // the second marker is a third
        ("target_offset.bin", 0, 1), // starts late
        ("target_offset.bin", 2, 2), // a gap
        ("target_offset.bin", 6, 4), // past the end
        ("target_offset.bin", 6, 0), // no room for its marker
    ];
    for (file, at, byte) in changes {
        let (_guard, store) = temp_store();
        for name in names {
            for suffix in [".bin", ".idx"] {
                let name = format!("demo_document_{name}{suffix}");
                let mut bytes = read(from.as_ref(), &name);
                if name.ends_with(&format!("document_{file}")) {
                    assert_ne!(bytes[at], byte, "{file} {at}");
                    bytes[at] = byte;
                }
                storage::write_all(store.as_ref(), &key(&name), &bytes).unwrap();
            }
        }
        let outcome = read_any(&store, "demo_document", &ReadOptions::default());
        // A changed id of the text is another text, not a contradiction.
        if (file, at) == ("context.bin", 0) {
            assert!(outcome.is_ok());
            continue;
        }
        let error = outcome.unwrap_err();
        assert!(
            matches!(error, Error::Malformed { fault: FormatRule::Triple, .. }),
            "{file}: {error}"
        );
    }
}

/// Documents of every shape, by a seed.
fn random_documents(seed: u64, sequences_max: u64, token_max: u64) -> Documents {
    let mut rng = Dice(seed);
    let sequence = |rng: &mut Dice| -> Vec<i64> {
        let len = rng.below(40) * rng.below(2) + rng.below(3);
        (0..len).map(|_| 1 + rng.below(token_max) as i64).collect()
    };
    let document = |rng: &mut Dice| {
        (0..rng.below(sequences_max + 1)).map(|_| sequence(rng)).collect::<Vec<_>>()
    };
    (0..rng.below(60)).map(|_| document(&mut rng)).collect()
}

#[test]
fn written_formats_round_trip() {
    for seed in 0..40 {
        let documents = random_documents(seed, 3, 65_534);
        let (_guard, store) = temp_store();
        let source = pair(&store, "a", Dtype::U16, &documents);
        assert_eq!(collect(&source).unwrap(), documents, "seed {seed}");
        write(&store, "again", Format::Mmididx, &source).unwrap();
        for suffix in [".bin", ".idx"] {
            let [a, b] =
                ["a", "again"].map(|name| read(store.as_ref(), &format!("{name}{suffix}")));
            assert_eq!(a, b, "seed {seed}{suffix}");
        }
        let flat: Vec<i64> = documents.iter().flatten().flatten().copied().collect();
        for format in [Format::Paddle, Format::Datatrove, Format::NanoGpt, Format::Yuan] {
            let name = format.name();
            let written = write(&store, name, format, &source).unwrap();
            assert_eq!(written.tokens, flat.len() as u64, "seed {seed}, {format}");
            let options = ReadOptions::default();
            let back = TokenSource::open(&store, &key(name), format, &options).unwrap();
            assert_eq!(back.dtype(), Dtype::U16, "seed {seed}, {format}");
            let found = collect(&back).unwrap();
            let expected: Documents = match format {
                Format::Paddle => without_empty(&documents),
                Format::Datatrove => documents.iter().map(|d| vec![d.concat()]).collect(),
                _ if flat.is_empty() => vec![],
                _ => vec![vec![flat.clone()]],
            };
            assert_eq!(found, expected, "seed {seed}, {format}");
        }
    }
}

fn without_empty(documents: &Documents) -> Documents {
    let some = |document: &Vec<Vec<i64>>| -> Vec<Vec<i64>> {
        document.iter().filter(|sequence| !sequence.is_empty()).cloned().collect()
    };
    documents.iter().map(some).filter(|document| !document.is_empty()).collect()
}

#[test]
fn the_eod_token_ends_documents_without_a_table() {
    let (_guard, store) = temp_store();
    let tokens: Vec<u8> = [5_u16, 6, 0, 0, 7, 8].iter().flat_map(|id| id.to_le_bytes()).collect();
    storage::write_all(store.as_ref(), &key("train.bin"), &tokens).unwrap();
    let eod = |eod| ReadOptions { eod, ..ReadOptions::default() };
    let documents = read_any(&store, "train.bin", &eod(Some(0))).unwrap();
    assert_eq!(documents, [[vec![5, 6, 0]], [vec![0]], [vec![7, 8]]]);
    assert_eq!(read_any(&store, "train.bin", &eod(None)).unwrap(), [[[5, 6, 0, 0, 7, 8]]]);
    // An id that the type cannot hold ends no document.
    let whole = read_any(&store, "train.bin", &eod(Some(65_536))).unwrap();
    assert_eq!(whole.len(), 1);
    let wide = ReadOptions { dtype: Some(Dtype::I32), ..ReadOptions::default() };
    assert_eq!(read_any(&store, "train.bin", &wide).unwrap(), [[[0x6_0005, 0, 0x8_0007]]]);
    assert!(Format::detect(&store, &key("train")).unwrap().is_none(), "a .bin that lost its .idx");
}

#[test]
fn types_are_converted_without_loss_or_refused() {
    let (_guard, store) = temp_store();
    let documents = vec![vec![vec![1, 70_000]], vec![vec![3]]];
    let wide = pair(&store, "wide", Dtype::I32, &documents);
    let error = write(&store, "n", Format::NanoGpt, &wide).unwrap_err();
    assert!(matches!(error, Error::IdOutside { id: 70_000, .. }), "{error}");
    assert_eq!(
        store.list_names(&Key::root()).unwrap(),
        ["wide.bin", "wide.crc", "wide.idx"],
        "nothing is left"
    );
    for dtype in [Dtype::I64, Dtype::I32] {
        let name = dtype.to_string();
        let options = WriteOptions { dtype: Some(dtype) };
        let mut writer =
            Writer::create(&store, &key(&name), Format::Mmididx, &wide, &options).unwrap();
        wide.read_into(&mut writer).unwrap();
        assert_eq!(writer.finish().unwrap().dtype, dtype);
        assert_eq!(read_any(&store, &name, &ReadOptions::default()).unwrap(), documents);
    }
    let unsigned = WriteOptions { dtype: Some(Dtype::U32) };
    for (format, fits) in [(Format::Datatrove, true), (Format::Mmididx, false)] {
        let writer = Writer::create(&store, &key("u"), format, &wide, &unsigned);
        assert_eq!(writer.is_ok(), fits, "{format}");
    }
}

#[test]
fn dolma_parts_are_read_in_order() {
    let (_guard, store) = temp_store();
    let gz = |text: &str| {
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        std::io::Write::write_all(&mut gz, text.as_bytes()).unwrap();
        gz.finish().unwrap()
    };
    let bytes = |ids: &[u16]| ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>();
    for (name, content) in [
        ("tok/part-0-00000.npy", bytes(&[1, 2, 3])),
        ("tok/part-0-00000.csv.gz", gz("0,2,a,s,1\r\n2,3,\"b,\n1,9\",s,2\r\n")),
        ("tok/part-0-00001.npy", bytes(&[4, 5])),
        // Zeros after a member are padding, also between two members.
        (
            "tok/part-0-00001.csv.gz",
            [gz("0,0,c,s,1\n"), vec![0; 600], gz("0,2,d,s,1\n"), vec![0; 3]].concat(),
        ),
        ("gap.npy", bytes(&[1, 2, 3])),
        ("gap.csv.gz", gz("0,1,a,s,1\n2,3,b,s,1\n")),
        ("short.npy", bytes(&[1])),
        ("short.csv.gz", gz("0,3,a,s,1\n")),
        ("truncated.npy", bytes(&[1, 2])),
        ("truncated.csv.gz", gz("0,2,a,s,1\n")[..20].to_vec()),
        ("zeros.npy", bytes(&[])),
        ("zeros.csv.gz", vec![0; 512]),
        ("garbage.npy", bytes(&[1])),
        ("garbage.csv.gz", [gz("0,1,a,s,1\n"), b"\0\0x".to_vec()].concat()),
        ("text.npy", bytes(&[1])),
        ("text.csv.gz", gz("start,end\n0,1\n")),
    ] {
        storage::write_all(store.as_ref(), &key(name), &content).unwrap();
    }
    let options = ReadOptions::default();
    let found = read_any(&store, "tok", &options).unwrap();
    assert_eq!(found, [[vec![1, 2]], [vec![3]], [vec![]], [vec![4, 5]]]);
    assert_eq!(read_any(&store, "tok/part-0-00001.npy", &options).unwrap().len(), 2);
    for name in ["gap", "short", "truncated", "zeros", "garbage", "text"] {
        let error = read_any(&store, &format!("{name}.npy"), &options).unwrap_err();
        assert!(matches!(error, Error::Malformed { .. }), "{name}: {error}");
    }
}

#[test]
fn census_counts_documents_and_tokens() {
    let (_guard, store) = temp_store();
    let documents =
        vec![vec![vec![5, 9]], vec![], vec![vec![9, 7], vec![], vec![9]], vec![vec![8]]];
    let source = pair(&store, "a", Dtype::U16, &documents);
    let report = Census::take(&source, Some(9)).unwrap();
    assert_eq!((report.documents, report.documents_empty), (4, 1));
    assert_eq!((report.sequences, report.sequences_empty, report.tokens), (5, 1, 6));
    assert_eq!((report.eod_tokens, report.documents_ended), (3, 2));
    assert_eq!(report.token_range, Some((5, 9)));
    assert_eq!(report.sequence_tokens_range, Some((0, 2)));
    assert_eq!(report.tokens_crc64, storage::crc64(&read(store.as_ref(), "a.bin")));
    assert!(report.check_vocab(10).is_ok() && report.check_vocab(9).is_err());
}

/// A file that is truncated at any byte, or has any byte changed, is read or refused. Nothing
/// panics, and no allocation exceeds the size of the file.
#[test]
fn truncated_and_changed_files_never_panic() {
    let legacy = golden("legacy");
    let cpm2 = golden("cpm2");
    let (_guard, made) = temp_store();
    // No document ends at half of the tokens: else their width would also match the index truncated
    // there.
    let documents = vec![vec![vec![1, 2]], vec![vec![3, 4, 5], vec![6]]];
    let source = pair(&made, "a", Dtype::U16, &documents);
    write(&made, "d", Format::Datatrove, &source).unwrap();
    write(&made, "y", Format::Yuan, &source).unwrap();
    let cases: [(_, _, &[&str]); 6] = [
        (&legacy, "tntidx_i32", &["tntidx_i32.idx", "tntidx_i32.bin"]),
        (&legacy, "paddle", &["paddle_idx.npz", "paddle_ids.npy"]),
        (&made, "d", &["d.ds.index", "d.ds"]),
        (&made, "y.npy", &["y.npy"]),
        (&made, "a", &["a.idx", "a.bin"]),
        (
            &cpm2,
            "demo_document",
            &[
                "demo_document_target_offset.bin",
                "demo_document_target_offset.idx",
                "demo_document_context.idx",
                "demo_document_context.bin",
                "demo_document_target.idx",
                "demo_document_target.bin",
            ],
        ),
    ];
    for (from, name, files) in cases {
        let (victim, others) = files.split_first().unwrap();
        let bytes = read(from.as_ref(), victim);
        // In memory, because there are thousands of files.
        let store: Arc<dyn Storage> = Arc::new(FaultStore::new(1, FaultPlan::default()));
        for file in others {
            copy(from.as_ref(), file, store.as_ref());
        }
        let victim = key(victim);
        let outcome = |bytes: &[u8]| {
            storage::write_all(store.as_ref(), &victim, bytes).unwrap();
            let outcome = read_any_or_nothing(&store, name);
            store.delete(&victim).unwrap();
            outcome
        };
        for len in 0..bytes.len() {
            assert!(outcome(&bytes[..len]).is_err(), "{name}: {victim} cut to {len} bytes");
        }
        for at in 0..bytes.len() {
            for flip in [0x01, 0x80, 0xff] {
                let mut bad = bytes.clone();
                bad[at] ^= flip;
                let _ = outcome(&bad);
            }
        }
        assert!(outcome(&bytes).is_ok(), "{name}");
        assert!(outcome(&[&bytes[..], &[0]].concat()).is_err(), "{name}: one byte more");
    }
}

fn read_any_or_nothing(store: &Arc<dyn Storage>, name: &str) -> Result<Documents> {
    match Format::detect(store, &key(name))? {
        Some((format, prefix)) => {
            collect(&TokenSource::open(store, &prefix, format, &ReadOptions::default())?)
        }
        None => panic!("{name} is there"),
    }
}
