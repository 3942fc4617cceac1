//! Layouts of Lustre as defined by `lustre_user.h`. Without a Lustre mount, the test checks that
//! the encoding equals that of its client.

use std::path::Path;

use storage::Error;
use storage::fs::lustre::{LayoutComponent, Purpose, Recommendation, Striping};

const V1: u32 = 0x0bd1_0bd0;
const V3: u32 = 0x0bd3_0bd0;
const COMPOSITE: u32 = 0x0bd6_0bd0;
const INITIALISED: u32 = 0x10;
const END: u64 = u64::MAX;

/// A plain layout: 32 bytes, 16 more for a pool, 24 for each target.
fn plain(magic: u32, pattern: u32, stripe_bytes: u32, targets: &[u32]) -> Vec<u8> {
    let mut lov = vec![0; if magic == V3 { 48 } else { 32 }];
    lov[0..4].copy_from_slice(&magic.to_le_bytes());
    lov[4..8].copy_from_slice(&pattern.to_le_bytes());
    lov[24..28].copy_from_slice(&stripe_bytes.to_le_bytes());
    lov[28..30].copy_from_slice(&(targets.len() as u16).to_le_bytes());
    if magic == V3 {
        lov[32..37].copy_from_slice(b"flash");
    }
    for target in targets {
        lov.extend([0x11; 20]);
        lov.extend(target.to_le_bytes());
    }
    lov
}

/// A header of 32 bytes, an entry of 48 for each part, and the parts' plain layouts.
fn composite(parts: &[(u64, u64, u32, Vec<u8>)]) -> Vec<u8> {
    let mut lov = vec![0; 32];
    lov[0..4].copy_from_slice(&COMPOSITE.to_le_bytes());
    lov[14..16].copy_from_slice(&(parts.len() as u16).to_le_bytes());
    let mut at = 32 + parts.len() * 48;
    for (start, end, flags, blob) in parts {
        let mut entry = vec![0; 48];
        entry[4..8].copy_from_slice(&flags.to_le_bytes());
        entry[8..16].copy_from_slice(&start.to_le_bytes());
        entry[16..24].copy_from_slice(&end.to_le_bytes());
        entry[24..28].copy_from_slice(&(at as u32).to_le_bytes());
        entry[28..32].copy_from_slice(&(blob.len() as u32).to_le_bytes());
        lov.extend(entry);
        at += blob.len();
    }
    parts.iter().for_each(|(.., blob)| lov.extend(blob));
    let size = lov.len() as u32;
    lov[4..8].copy_from_slice(&size.to_le_bytes());
    lov
}

/// The encoding of a layout of one component.
fn of(part: LayoutComponent) -> Vec<u8> {
    Striping { parts: vec![part] }.to_bytes()
}

fn target(lov: &[u8], offset: u64) -> Option<u32> {
    Striping::parse(lov).unwrap().parts.iter().find_map(|part| part.target(offset))
}

#[test]
fn target_of_each_stripe() {
    for magic in [V1, V3] {
        let lov = plain(magic, 1, 1 << 20, &[7, 0x1f, 2]);
        for (offset, expected) in [(0, 7), (1 << 20, 0x1f), ((3 << 20) - 1, 2), (3 << 20, 7)] {
            assert_eq!(target(&lov, offset), Some(expected));
        }
    }
    let (small, large) = (plain(V1, 1, 1 << 20, &[4]), plain(V3, 1, 4 << 20, &[5, 6]));
    let without_objects = plain(V1, 1, 1 << 20, &[9]);
    let lov = composite(&[
        (0, 1 << 20, INITIALISED, small),
        (1 << 20, 1 << 30, INITIALISED, large),
        (1 << 30, END, 0, without_objects),
    ]);
    assert_eq!(target(&lov, 0), Some(4));
    // Stripes are counted from the start of the file.
    assert_eq!((target(&lov, 3 << 20), target(&lov, 4 << 20)), (Some(5), Some(6)));
    // A component without objects has no bytes on its future target.
    assert_eq!(target(&lov, 1 << 30), None);
}

#[test]
fn layouts_are_formatted() {
    for (lov, expected) in [
        (plain(V1, 1, 1 << 20, &[7]), "1 stripe of 1 MiB"),
        (plain(V3, 1, 4 << 20, &[7, 8]), "2 stripes of 4 MiB in the pool flash"),
        (
            of(LayoutComponent::whole(LayoutComponent::ALL, 0)),
            "stripes on all targets of the default size",
        ),
        (of(LayoutComponent::whole(0, 65536)), "the default number of stripes of 64 KiB"),
        (
            composite(&[
                (0, 1 << 20, INITIALISED, plain(V1, 0x100, 1 << 20, &[])),
                (1 << 20, 1 << 30, 0, of(LayoutComponent::whole(4, 1 << 20))),
                (1 << 30, END, 0, of(LayoutComponent::whole(LayoutComponent::ALL, 4 << 20))),
            ]),
            "from 0 B to 1 MiB: on the metadata target; from 1 MiB to 1 GiB: 4 stripes of 1 MiB; \
             from 1 GiB to the end: stripes on all targets of 4 MiB",
        ),
    ] {
        assert_eq!(Striping::parse(&lov).unwrap().to_string(), expected);
    }
}

/// Byte for byte what `lfs setstripe -S 8M -c 2`, the same with `-p flash`, and
/// `lfs setstripe -E 1G -c 1 -S 1M -E -1 -c 8 -S 4M` pass to the client.
#[test]
fn encodes_like_lfs_setstripe() {
    let mut part = LayoutComponent::whole(2, 8 << 20);
    let bytes = of(part.clone());
    assert_eq!(bytes[..8], [0xd0, 0x0b, 0xd1, 0x0b, 1, 0, 0, 0]);
    assert_eq!(bytes[8..24], [0; 16]);
    assert_eq!(bytes[24..], [0, 0, 0x80, 0, 2, 0, 0xff, 0xff]);
    part.pool = "flash".to_owned();
    let bytes = of(part.clone());
    assert_eq!(bytes[..4], [0xd0, 0x0b, 0xd3, 0x0b]);
    assert_eq!(bytes[32..], *b"flash\0\0\0\0\0\0\0\0\0\0\0");

    let mut parts = [LayoutComponent::whole(1, 1 << 20), LayoutComponent::whole(8, 4 << 20)];
    (parts[0].end, parts[1].start) = (1 << 30, 1 << 30);
    let grown = Striping { parts: parts.to_vec() };
    let expected = composite(&[
        (0, 1 << 30, 0, of(LayoutComponent::whole(1, 1 << 20))),
        (1 << 30, END, 0, of(LayoutComponent::whole(8, 4 << 20))),
    ]);
    assert_eq!(grown.to_bytes(), expected);
    assert_eq!(Striping::parse(&expected).unwrap(), grown);
}

/// A layout that is truncated anywhere is refused; one with any byte changed causes no panic.
#[test]
fn invalid_layouts_are_refused() {
    let lov = composite(&[(0, END, INITIALISED, plain(V3, 1, 65536, &[1, 2]))]);
    for len in 0..lov.len() {
        let parsed = Striping::parse(&lov[..len]);
        assert!(parsed.is_none(), "{len} of {} bytes gave {parsed:?}", lov.len());
    }
    for i in 0..lov.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut bad = lov.clone();
            bad[i] ^= flip;
            for part in Striping::parse(&bad).into_iter().flat_map(|striping| striping.parts) {
                let _ = part.target(1 << 20);
            }
        }
    }
    // Another kind of layout, and one of the other byte order.
    assert!(Striping::parse(&0x0bd7_0bd0_u32.to_le_bytes()).is_none());
    assert!(Striping::parse(&V1.swap_bytes().to_le_bytes()).is_none());
}

#[test]
fn check_names_the_invalid_value() {
    let whole = |count, size| Striping { parts: vec![LayoutComponent::whole(count, size)] };
    assert_eq!(whole(4, 1 << 20).check(), Ok(()));
    assert_eq!(whole(LayoutComponent::ALL, 0).check(), Ok(()));
    let cut = |at: u64, start: u64, size: u32| {
        let mut parts = vec![LayoutComponent::whole(1, size), LayoutComponent::whole(2, size)];
        (parts[0].end, parts[1].start) = (at, start);
        Striping { parts }
    };
    assert_eq!(cut(1 << 30, 1 << 30, 1 << 20).check(), Ok(()));
    let mut pool = whole(1, 1 << 20);
    pool.parts[0].pool = "a pool".to_owned();
    let mut long = whole(1, 1 << 20);
    long.parts[0].pool = "sixteen_letters_".to_owned();
    let mut short = whole(1, 1 << 20);
    short.parts[0].end = 1 << 30;
    for (bad, expected) in [
        (whole(1, 1000), "64 KiB"),
        (whole(2001, 1 << 20), "at most 2000 stripes"),
        (cut(1 << 30, 2 << 30, 1 << 20), "starts at 1073741824"),
        (cut(1 << 20, 1 << 20, 4 << 20), "a multiple of 4194304"),
        (pool, "a pool name"),
        (long, "15 letters"),
        (short, "a last component to the end"),
        (Striping { parts: Vec::new() }, "components, found 0"),
    ] {
        let error = bad.check().unwrap_err();
        assert!(error.contains(expected), "{bad:?}: {error}");
    }
}

/// The layout read back is compared with the request, because a site may report success without
/// effect.
#[test]
fn grants_compares_with_the_request() {
    let whole = |count, size| Striping { parts: vec![LayoutComponent::whole(count, size)] };
    let of_site = whole(1, 1 << 20);
    assert!(whole(8, 4 << 20).grants(&whole(8, 4 << 20)));
    assert!(whole(16, 4 << 20).grants(&whole(LayoutComponent::ALL, 4 << 20)));
    assert!(of_site.grants(&whole(0, 0)) && of_site.grants(&whole(1, 0)));
    assert!(!of_site.grants(&whole(8, 4 << 20)) && !of_site.grants(&whole(1, 4 << 20)));
    assert!(!whole(4, 4 << 20).grants(&whole(8, 4 << 20)));
}

#[test]
fn other_file_systems_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("new");
    let requested = Striping { parts: vec![LayoutComponent::whole(4, 1 << 20)] };
    for outcome in [
        Striping::of(folder.path()).map(drop),
        requested.set(folder.path()).map(drop),
        requested.set(&file).map(drop),
    ] {
        let error = outcome.unwrap_err();
        assert!(matches!(error, Error::Refused { .. }), "{error}");
        assert!(error.to_string().contains("only Lustre has stripes"), "{error}");
    }
    assert!(!file.exists());
    let absent = Striping::of(Path::new("/not/there")).unwrap_err();
    assert!(matches!(absent, Error::NotFound { .. }), "{absent}");
}

#[test]
fn recommendations_depend_on_purpose_and_size() {
    const GIB: u64 = 1 << 30;
    let of = |purpose, bytes, nodes, targets| {
        let Recommendation { stripe_count, stripe_bytes, reason } =
            Recommendation::new(purpose, bytes, nodes, targets);
        assert!(!reason.is_empty());
        let part = LayoutComponent::whole(stripe_count, stripe_bytes);
        assert_eq!(Striping { parts: vec![part] }.check(), Ok(()));
        (stripe_count, stripe_bytes >> 10)
    };
    use Purpose::{Checkpoint, Data, Index, Shared};
    assert_eq!(of(Index, 9 * GIB, 64, Some(32)), (1, 1 << 10));
    assert_eq!(of(Data, 1000, 64, Some(32)), (1, 1 << 10));
    assert_eq!(of(Data, GIB / 2, 4, Some(32)), (1, 4 << 10));
    assert_eq!(of(Data, 10 * GIB, 4, Some(32)), (4, 4 << 10));
    assert_eq!(of(Data, 10 * GIB, 64, Some(32)), (8, 1 << 10));
    assert_eq!(of(Data, 10 * GIB, 64, Some(2)), (2, 1 << 10));
    assert_eq!(of(Data, 500 * GIB, 128, Some(32)), (32, 1 << 10));
    assert_eq!(of(Data, 500 * GIB, 128, None), (LayoutComponent::ALL, 1 << 10));
    // Many writers reach all targets; few do not.
    assert_eq!(of(Checkpoint, 3 * GIB, 64, Some(32)), (1, 8 << 10));
    assert_eq!(of(Checkpoint, 3 * GIB, 8, Some(32)), (3, 8 << 10));
    assert_eq!(of(Checkpoint, 40 * GIB, 1, Some(32)), (4, 8 << 10));
    assert_eq!(of(Checkpoint, GIB / 2, 1, Some(32)), (1, 8 << 10));
    assert_eq!(of(Shared, 64 * GIB, 16, Some(32)), (16, 16 << 10));
    assert_eq!(of(Shared, GIB / 4, 64, Some(8)), (8, 4 << 10));
}
