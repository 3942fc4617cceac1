//! Striping of new Lustre files by their length: a file on one target has the bandwidth of that
//! target, and a small one on many targets only costs more to open and lock.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use crate::fs::filesystem::folder_of;
use crate::fs::lustre::{self, LayoutComponent};
use crate::fs::placement::Layout;
use crate::sys::aligned_buffer::BUF_BYTES;
use crate::sys::syscalls;

/// Files from this length on are striped explicitly; shorter ones get the site's layout.
const STRIPED_BYTES_MIN: u64 = 1 << 30;

/// A target for each GiB, up to four: as Lustre's manual advises for one writer a file. Many
/// writers then use all targets, because each writes its own files.
const TARGETS_MAX: u64 = 4;

/// A stripe is a staging buffer, so that no write is cut in two and no lock is requested twice.
const STRIPE_BYTES: u32 = BUF_BYTES as u32;

/// The layout of a new file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StripePolicy {
    targets: u16,
}

impl StripePolicy {
    /// The layout for a file of this length; `None` to leave it to the site.
    pub(crate) fn for_len(len_bytes: u64) -> Option<Self> {
        let targets = (len_bytes / STRIPED_BYTES_MIN).min(TARGETS_MAX);
        // fits: at most TARGETS_MAX
        (targets > 0).then_some(StripePolicy { targets: targets as u16 })
    }

    fn part(self) -> LayoutComponent {
        LayoutComponent::whole(self.targets, STRIPE_BYTES)
    }

    /// Creates a file with this layout, unless its folder has one that grows with the file, which
    /// the site's administrators chose on purpose. `None`: the folder has such a layout, or Lustre
    /// refused.
    pub(crate) fn create(self, path: &Path, options: &OpenOptions) -> io::Result<Option<File>> {
        if lustre::is_composite(&File::open(folder_of(path))?) {
            return Ok(None);
        }
        let file = options.clone().custom_flags(lustre::DELAY_CREATE).open(path)?;
        let set = syscalls::set_attribute(&file, lustre::ATTRIBUTE, &self.part().to_bytes());
        let layout = set.map(|()| Layout::of(&file, "lustre"));
        match layout {
            Ok(Layout::Lustre(_)) => Ok(Some(file)),
            refused => {
                log::warn!("{}: stripe layout not set: {refused:?}", path.display());
                drop(file);
                std::fs::remove_file(path)?;
                Ok(None)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longer_files_have_more_targets() {
        let targets = |len| StripePolicy::for_len(len).map(|stripes| stripes.targets);
        const GIB: u64 = 1 << 30;
        assert_eq!([0, 1, GIB - 1].map(targets), [None; 3]);
        assert_eq!([GIB, 3 * GIB - 1, 3 * GIB].map(targets), [Some(1), Some(2), Some(3)]);
        assert_eq!([4 * GIB, u64::MAX].map(targets), [Some(4), Some(4)]);
    }

    /// Byte for byte what `lfs setstripe -S 8M -c 2` passes to the client.
    #[test]
    fn encodes_like_lfs_setstripe() {
        let bytes = StripePolicy { targets: 2 }.part().to_bytes();
        assert_eq!(bytes[..8], [0xd0, 0x0b, 0xd1, 0x0b, 1, 0, 0, 0]);
        assert_eq!(bytes[8..24], [0; 16]);
        assert_eq!(bytes[24..], [0, 0, 0x80, 0, 2, 0, 0xff, 0xff]);
    }

    /// Other file systems than Lustre have no such attribute: no file is left, and the caller
    /// creates its file as usual.
    #[test]
    fn a_refused_layout_leaves_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true);
        assert!(StripePolicy { targets: 1 }.create(&path, &options).unwrap().is_none());
        assert!(!path.exists());
    }
}
