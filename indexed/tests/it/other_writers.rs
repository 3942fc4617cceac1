//! Files with the names and headers of a format whose contents are those of another writer.

use std::sync::Arc;

use crate::common::{golden, key, read, temp_store};
use crate::formats::read_any;
use indexed::{Error, FormatRule, ReadOptions};
use storage::Storage;

/// Writes changed goldens of the older formats, and returns the error of reading them.
fn error_of(name: &str, files: &[(&str, Vec<u8>)]) -> Error {
    let (_guard, store) = temp_store();
    for (file, bytes) in files {
        storage::write_all(store.as_ref(), &key(file), bytes).unwrap();
    }
    read_any(&store, name, &ReadOptions::default()).unwrap_err()
}

fn assert_fault(error: &Error, expected: FormatRule, case: &str) {
    let Error::Malformed { fault, .. } = error else { panic!("{case}: {error}") };
    assert_eq!(*fault, expected, "{case}: {error}");
}

#[test]
fn tntidx_headers_that_contradict_the_file_are_refused() {
    let legacy = golden("legacy");
    let [idx, bin] = ["idx", "bin"].map(|end| read(&*legacy, &format!("tntidx_i32.{end}")));
    for (at, bytes, expected) in [
        // The magic number and the version of another format.
        (0, &b"TNTIDX\0\x01"[..], FormatRule::Magic),
        (8, &[2][..], FormatRule::Version),
        (16, &[11], FormatRule::Dtype),
        // Fewer items than sizes, and more of both than the file has.
        (32, &[2], FormatRule::SequenceLength),
        (32, &[4, 0, 0, 0, 0, 0, 0, 0, 4], FormatRule::TooShort),
        // An item of two axes, as fairseq writes for other data than tokens.
        (56 + 8, &[2], FormatRule::SequenceLength),
    ] {
        let mut bad = idx.clone();
        bad[at..at + bytes.len()].copy_from_slice(bytes);
        let error = error_of("a", &[("a.idx", bad), ("a.bin", bin.clone())]);
        assert_fault(&error, expected, &format!("{bytes:?} at {at}"));
    }
}

/// Replaces each occurrence of a few bytes by as many others.
fn replaced(bytes: &[u8], from: &str, to: &str) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let places: Vec<usize> = (0..bytes.len() - from.len() + 1)
        .filter(|&at| bytes[at..].starts_with(from.as_bytes()))
        .collect();
    assert!(!places.is_empty(), "no {from}");
    for at in places {
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    }
    bytes
}

#[test]
fn arrays_of_other_programs_are_not_paddles() {
    let legacy: Arc<dyn Storage> = golden("legacy");
    let [ids, index] = ["ids.npy", "idx.npz"].map(|end| read(&*legacy, &format!("paddle_{end}")));
    // A matrix, and numbers that are no ids.
    let matrix = replaced(&ids, "(6,), ", "(3,2),");
    let floats = replaced(&ids, "'<u2'", "'<f2'");
    // An archive of numpy with another array, a file that is no archive, and half of one.
    let other = replaced(&index, "lens.npy", "mean.npy");
    let half = index[..index.len() / 2].to_vec();
    for (ids, index, expected, case) in [
        (matrix, index.clone(), FormatRule::Npy, "matrix"),
        (floats, index, FormatRule::Npy, "floats"),
        (ids.clone(), other, FormatRule::Zip, "other"),
        (ids.clone(), ids.clone(), FormatRule::Zip, "no archive"),
        (ids, half, FormatRule::Zip, "half"),
    ] {
        let error = error_of("p", &[("p_ids.npy", ids), ("p_idx.npz", index)]);
        assert_fault(&error, expected, case);
    }
}
