//! Finds the server that has a byte of a file, without a library of the file system, so that the
//! report of a stuck read names a machine that an administrator can examine.

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;

use crate::fs::lustre::Striping;
use crate::sys::syscalls;

/// How the bytes of one file are spread over servers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Unknown, or there is one server.
    #[default]
    Unknown,
    /// Lustre: parts of the file, each striped over object storage targets.
    Lustre(Striping),
    /// CephFS: objects of a pool, whose names contain the inode and the index of the object.
    Ceph(CephLayout),
}

/// The layout of a CephFS file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CephLayout {
    inode: u64,
    stripe_unit: u64,
    stripe_count: u64,
    object_size: u64,
    pool: String,
    /// Namespace in the pool; empty for the default one.
    namespace: String,
}

/// More objects than any set of a layout in use has.
const STRIPES_MAX: u64 = 2000;

impl Layout {
    /// Queries the file system. Blocks if that does.
    pub(crate) fn of(file: &File, file_system: &str) -> Self {
        match file_system {
            "lustre" => {
                let lov = syscalls::attribute(file, c"lustre.lov").ok();
                lov.and_then(|lov| Striping::parse(&lov)).map_or(Layout::Unknown, Layout::Lustre)
            }
            "ceph" | "fuse.ceph-fuse" | "fuse.ceph" => {
                let inode = file.metadata().map_or(0, |meta| meta.ino());
                let text = syscalls::attribute(file, c"ceph.file.layout").ok();
                let parsed =
                    text.and_then(|text| parse_ceph(&String::from_utf8(text).ok()?, inode));
                parsed.map_or(Layout::Unknown, Layout::Ceph)
            }
            _ => Layout::Unknown,
        }
    }

    /// The server, or the object, that has the byte at this offset; empty if unknown.
    pub(crate) fn placement(&self, offset: u64) -> String {
        match self {
            Layout::Unknown => String::new(),
            Layout::Lustre(striping) => {
                let target = striping.parts.iter().find_map(|part| part.target(offset));
                target.map(|target| format!("OST{target:04x}")).unwrap_or_default()
            }
            Layout::Ceph(layout) => layout.object(offset),
        }
    }
}

impl CephLayout {
    /// Stripes go round robin over the objects of a set until they are full; then the next set
    /// follows.
    fn object(&self, offset: u64) -> String {
        let block = offset / self.stripe_unit;
        let (row, column) = (block / self.stripe_count, block % self.stripe_count);
        let rows_per_object = self.object_size / self.stripe_unit;
        let object = row / rows_per_object * self.stripe_count + column;
        let CephLayout { inode, pool, namespace, .. } = self;
        let name = format!("{inode:x}.{object:08x}");
        // The OSDs that have it are in the cluster map, which a mount does not show.
        let map = format!("ceph osd map {pool} {name} {namespace}");
        format!("object {name} of pool {pool} (`{}` lists its OSDs)", map.trim_end())
    }
}

/// `stripe_unit=4194304 stripe_count=1 object_size=4194304 pool=cephfs_data`, followed by
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
        stripe_count: number("stripe_count").filter(|&count| count <= STRIPES_MAX)?,
        object_size: number("object_size")?,
        pool: field("pool")?.to_owned(),
        namespace: field("pool_namespace").unwrap_or_default().to_owned(),
    };
    (layout.object_size >= layout.stripe_unit).then_some(layout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_the_object_of_a_ceph_file() {
        let text = "stripe_unit=65536 stripe_count=2 object_size=131072 pool=cephfs";
        let layout = Layout::Ceph(parse_ceph(text, 0x100_0000_01f5).unwrap());
        let objects = [0, 1, 0, 1, 2, 3];
        for (block, object) in objects.into_iter().enumerate() {
            let name = format!("100000001f5.{object:08x}");
            let expected = format!(
                "object {name} of pool cephfs (`ceph osd map cephfs {name}` lists its OSDs)"
            );
            assert_eq!(layout.placement(block as u64 * 65536), expected);
        }
        let text = format!("{text}_data pool_namespace=runs\0");
        let placement = Layout::Ceph(parse_ceph(&text, 0x1f5).unwrap()).placement(0);
        let expected = "ceph osd map cephfs_data 1f5.00000000 runs`";
        assert!(placement.contains(expected), "{placement}");
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
