//! Which server has a byte of a file, as far as the file system tells without a library of its own:
//! so that a read that hangs can be named by the machine that an administrator can look at.

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;

use crate::sys;

/// How the bytes of one file are spread over servers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Layout {
    /// The file system does not tell, or there is one server.
    #[default]
    Unknown,
    /// Lustre: parts of the file, each striped over object storage targets.
    Lustre(Vec<Component>),
    /// CephFS: objects of a pool, whose names say which file and which part of it they are.
    Ceph(CephLayout),
}

/// A part of a Lustre file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Component {
    start: u64,
    /// One past its last byte; the largest number is the end of the file.
    end: u64,
    stripe_bytes: u32,
    /// Indices of the targets, in the order of stripes. Empty if it has no objects yet.
    targets: Vec<u32>,
}

/// The layout of a CephFS file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CephLayout {
    inode: u64,
    stripe_unit: u64,
    stripe_count: u64,
    object_size: u64,
    pool: String,
    /// Of the pool; empty for its usual one.
    namespace: String,
}

/// What `lustre.lov` begins with: a plain layout, one with a pool of targets, and a composite.
const LOV_V1: u32 = 0x0bd1_0bd0;
const LOV_V3: u32 = 0x0bd3_0bd0;
const LOV_COMPOSITE: u32 = 0x0bd6_0bd0;

/// Bytes before the targets of a plain layout, those of one target, and those of the header and of
/// an entry of a composite.
const V1_BYTES: usize = 32;
const V3_BYTES: usize = 48;
const TARGET_BYTES: usize = 24;
const COMPOSITE_BYTES: usize = 32;
const ENTRY_BYTES: usize = 48;

/// An entry whose objects exist.
const ENTRY_INITIALISED: u32 = 0x10;

/// The most targets a file may have, and more entries than any layout in use.
const TARGETS_MAX: usize = 2000;
const ENTRIES_MAX: usize = 1024;

impl Layout {
    /// Asks the file system. Blocks if that does.
    pub(crate) fn of(file: &File, file_system: &str) -> Self {
        match file_system {
            "lustre" => {
                let told = sys::attribute(file, c"lustre.lov").ok();
                told.and_then(|lov| parse_lustre(&lov)).map_or(Layout::Unknown, Layout::Lustre)
            }
            "ceph" | "fuse.ceph-fuse" | "fuse.ceph" => {
                let inode = file.metadata().map_or(0, |meta| meta.ino());
                let told = sys::attribute(file, c"ceph.file.layout").ok();
                let parsed =
                    told.and_then(|text| parse_ceph(&String::from_utf8(text).ok()?, inode));
                parsed.map_or(Layout::Unknown, Layout::Ceph)
            }
            _ => Layout::Unknown,
        }
    }

    /// The server, or the object, that has the byte at this offset; empty if that is not known.
    pub(crate) fn placement(&self, offset: u64) -> String {
        match self {
            Layout::Unknown => String::new(),
            Layout::Lustre(components) => {
                let target = components.iter().find_map(|component| component.target(offset));
                target.map(|target| format!("OST{target:04x}")).unwrap_or_default()
            }
            Layout::Ceph(layout) => layout.object(offset),
        }
    }
}

impl Component {
    fn target(&self, offset: u64) -> Option<u32> {
        if offset < self.start || offset >= self.end || self.targets.is_empty() {
            return None;
        }
        let stripe = offset / u64::from(self.stripe_bytes);
        Some(self.targets[(stripe % self.targets.len() as u64) as usize]) // fits: below the length
    }
}

impl CephLayout {
    /// Stripes go round the objects of a set until they are full; then comes the next set.
    fn object(&self, offset: u64) -> String {
        let block = offset / self.stripe_unit;
        let (row, column) = (block / self.stripe_count, block % self.stripe_count);
        let rows_per_object = self.object_size / self.stripe_unit;
        let object = row / rows_per_object * self.stripe_count + column;
        let CephLayout { inode, pool, namespace, .. } = self;
        let name = format!("{inode:x}.{object:08x}");
        // Which OSDs have it, the map of the cluster says, which a mount does not show.
        let map = format!("ceph osd map {pool} {name} {namespace}");
        format!("object {name} of pool {pool} (`{}` names its OSDs)", map.trim_end())
    }
}

/// Whether a folder of Lustre has a layout of several parts for its files, as sites have it that
/// let layouts grow with them.
pub(crate) fn grows(folder: &File) -> bool {
    let told = sys::attribute(folder, c"lustre.lov").ok();
    told.and_then(|lov| u32_at(&lov, 0)) == Some(LOV_COMPOSITE)
}

/// The value of `lustre.lov`, as `lustre_user.h` lays it out. `None` for what is no such thing.
fn parse_lustre(lov: &[u8]) -> Option<Vec<Component>> {
    if u32_at(lov, 0)? != LOV_COMPOSITE {
        return Some(vec![parse_plain(lov, 0, u64::MAX)?]);
    }
    let entries = usize::from(u16_at(lov, 14)?);
    if entries > ENTRIES_MAX {
        return None;
    }
    let mut components = Vec::new();
    for i in 0..entries {
        let entry = lov.get(COMPOSITE_BYTES + i * ENTRY_BYTES..)?.get(..ENTRY_BYTES)?;
        if u32_at(entry, 4)? & ENTRY_INITIALISED == 0 {
            continue;
        }
        let (start, end) = (u64_at(entry, 8)?, u64_at(entry, 16)?);
        let first = u32_at(entry, 24)? as usize;
        let last = first.checked_add(u32_at(entry, 28)? as usize)?;
        components.push(parse_plain(lov.get(first..last)?, start, end)?);
    }
    Some(components)
}

fn parse_plain(lov: &[u8], start: u64, end: u64) -> Option<Component> {
    let targets_at = match u32_at(lov, 0)? {
        LOV_V1 => V1_BYTES,
        LOV_V3 => V3_BYTES,
        _ => return None,
    };
    let (stripe_bytes, count) = (u32_at(lov, 24)?, usize::from(u16_at(lov, 28)?));
    // A file without objects yet has the count that was wished for, and no targets.
    if stripe_bytes == 0 || start > end {
        return None;
    }
    let target = |i| u32_at(lov, targets_at + i * TARGET_BYTES + 20);
    let whole = count <= TARGETS_MAX && lov.len() >= targets_at + count * TARGET_BYTES;
    let targets = if whole { (0..count).map(target).collect::<Option<_>>()? } else { Vec::new() };
    Some(Component { start, end, stripe_bytes, targets })
}

/// `stripe_unit=4194304 stripe_count=1 object_size=4194304 pool=cephfs_data`, and behind it
/// `pool_namespace=a` if the file is in one.
fn parse_ceph(text: &str, inode: u64) -> Option<CephLayout> {
    let field = |name: &str| {
        let mut words = text.trim_end_matches('\0').split_ascii_whitespace();
        words.find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
    };
    let number = |name| field(name)?.parse::<u64>().ok().filter(|&number| number > 0);
    let layout = CephLayout {
        inode,
        stripe_unit: number("stripe_unit")?,
        stripe_count: number("stripe_count").filter(|&count| count <= TARGETS_MAX as u64)?,
        object_size: number("object_size")?,
        pool: field("pool")?.to_owned(),
        namespace: field("pool_namespace").unwrap_or_default().to_owned(),
    };
    (layout.object_size >= layout.stripe_unit).then_some(layout)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A plain layout as `lustre_user.h` has it.
    fn plain(magic: u32, stripe_bytes: u32, targets: &[u32]) -> Vec<u8> {
        let mut lov = vec![0; if magic == LOV_V3 { V3_BYTES } else { V1_BYTES }];
        lov[0..4].copy_from_slice(&magic.to_le_bytes());
        lov[4] = 1;
        lov[24..28].copy_from_slice(&stripe_bytes.to_le_bytes());
        lov[28..30].copy_from_slice(&(targets.len() as u16).to_le_bytes());
        for target in targets {
            lov.extend([0x11; 20]);
            lov.extend(target.to_le_bytes());
        }
        lov
    }

    fn composite(parts: &[(u64, u64, u32, Vec<u8>)]) -> Vec<u8> {
        let mut lov = vec![0; COMPOSITE_BYTES];
        lov[0..4].copy_from_slice(&LOV_COMPOSITE.to_le_bytes());
        lov[14..16].copy_from_slice(&(parts.len() as u16).to_le_bytes());
        let mut at = COMPOSITE_BYTES + parts.len() * ENTRY_BYTES;
        for (start, end, flags, blob) in parts {
            let mut entry = vec![0; ENTRY_BYTES];
            entry[4..8].copy_from_slice(&flags.to_le_bytes());
            entry[8..16].copy_from_slice(&start.to_le_bytes());
            entry[16..24].copy_from_slice(&end.to_le_bytes());
            entry[24..28].copy_from_slice(&(at as u32).to_le_bytes());
            entry[28..32].copy_from_slice(&(blob.len() as u32).to_le_bytes());
            lov.extend(entry);
            at += blob.len();
        }
        parts.iter().for_each(|(.., blob)| lov.extend(blob));
        lov
    }

    fn ost(lov: &[u8], offset: u64) -> String {
        Layout::Lustre(parse_lustre(lov).unwrap()).placement(offset)
    }

    #[test]
    fn names_the_target_of_a_stripe() {
        for magic in [LOV_V1, LOV_V3] {
            let lov = plain(magic, 1 << 20, &[7, 0x1f, 2]);
            for (offset, due) in [
                (0, "OST0007"),
                (1 << 20, "OST001f"),
                ((3 << 20) - 1, "OST0002"),
                (3 << 20, "OST0007"),
            ] {
                assert_eq!(ost(&lov, offset), due);
            }
        }
    }

    #[test]
    fn names_the_target_in_a_composite() {
        let (small, large) = (plain(LOV_V1, 1 << 20, &[4]), plain(LOV_V3, 4 << 20, &[5, 6]));
        let unborn = plain(LOV_V1, 1 << 20, &[]);
        let lov = composite(&[
            (0, 1 << 20, ENTRY_INITIALISED, small),
            (1 << 20, 1 << 30, ENTRY_INITIALISED, large),
            (1 << 30, u64::MAX, 0, unborn),
        ]);
        assert_eq!(ost(&lov, 0), "OST0004");
        // Stripes are counted from the start of the file.
        assert_eq!(ost(&lov, 3 << 20), "OST0005");
        assert_eq!(ost(&lov, 4 << 20), "OST0006");
        assert_eq!(ost(&lov, 1 << 30), "");
    }

    /// Cut off anywhere, or with any byte changed, it is refused or understood, and never more.
    #[test]
    fn what_is_no_layout_is_refused() {
        let lov = composite(&[(0, u64::MAX, ENTRY_INITIALISED, plain(LOV_V3, 65536, &[1, 2]))]);
        for len in 0..lov.len() {
            let parsed = parse_lustre(&lov[..len]);
            assert!(parsed.is_none(), "{len} of {} bytes gave {parsed:?}", lov.len());
        }
        for i in 0..lov.len() {
            for flip in [0x01, 0x80, 0xff] {
                let mut bad = lov.clone();
                bad[i] ^= flip;
                if let Some(components) = parse_lustre(&bad) {
                    Layout::Lustre(components).placement(1 << 20);
                }
            }
        }
        assert!(parse_lustre(&0x0bd7_0bd0_u32.to_le_bytes()).is_none());
        assert!(parse_lustre(&LOV_V1.swap_bytes().to_le_bytes()).is_none());
    }

    #[test]
    fn names_the_object_of_a_ceph_file() {
        let text = "stripe_unit=65536 stripe_count=2 object_size=131072 pool=cephfs";
        let layout = Layout::Ceph(parse_ceph(text, 0x100_0000_01f5).unwrap());
        let objects = [0, 1, 0, 1, 2, 3];
        for (block, object) in objects.into_iter().enumerate() {
            let name = format!("100000001f5.{object:08x}");
            let due = format!(
                "object {name} of pool cephfs (`ceph osd map cephfs {name}` names its OSDs)"
            );
            assert_eq!(layout.placement(block as u64 * 65536), due);
        }
        let text = format!("{text}_data pool_namespace=runs\0");
        let placement = Layout::Ceph(parse_ceph(&text, 0x1f5).unwrap()).placement(0);
        let due = "ceph osd map cephfs_data 1f5.00000000 runs`";
        assert!(placement.contains(due), "{placement}");
        for bad in [
            "",
            "stripe_unit=0 stripe_count=1 object_size=1 pool=a",
            "pool=a",
            "stripe_unit=8 stripe_count=1 object_size=4 pool=a",
            "stripe_unit=8 stripe_count=x object_size=8 pool=a",
        ] {
            assert!(parse_ceph(bad, 1).is_none(), "{bad:?} was accepted");
        }
    }
}
