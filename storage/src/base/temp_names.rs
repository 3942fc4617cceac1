//! Names of files that are being written, and of folders that are being deleted: `.NAME.tmp-OWNER`,
//! and `.NAME.draft` for a resumable upload, which outlives its writer. They are hidden from
//! listings. A temporary name contains its writer, so that orphans of a dead process are
//! distinguished from files of a live one.

use crate::ProcessIdentity;

const MARK: &str = ".tmp-";
const DRAFT: &str = ".draft";

/// Linux takes names of 255 bytes.
const NAME_BYTES_MAX: usize = 255;

/// A fresh temporary name for `name`, which is truncated if the result would be too long.
pub(crate) fn name_for(name: &str, writer: &ProcessIdentity) -> String {
    let tail = format!("{MARK}{writer}");
    let room_bytes = NAME_BYTES_MAX.saturating_sub(tail.len() + 1);
    let kept_len = (0..=room_bytes.min(name.len())).rev().find(|&at| name.is_char_boundary(at));
    format!(".{}{tail}", &name[..kept_len.unwrap_or(0)])
}

/// The process that made a temporary name; `None` for every other name.
pub(crate) fn writer_of(name: &str) -> Option<ProcessIdentity> {
    let (_, tail) = name.strip_prefix('.')?.rsplit_once(MARK)?;
    ProcessIdentity::parse(tail)
}

/// The file name of an object's resumable upload: always the same, so that the process that resumes
/// it finds it.
pub(crate) fn draft_name(name: &str) -> String {
    format!(".{name}{DRAFT}")
}

/// Whether this is the name of a resumable upload.
pub(crate) fn is_draft(name: &str) -> bool {
    name.starts_with('.') && name.ends_with(DRAFT)
}

/// Whether listings omit a name: temporary names, and those that NFS (`.nfs` and digits) and FUSE
/// give to a file that was deleted while open.
pub(crate) fn is_hidden(name: &str) -> bool {
    let deleted = [".nfs", ".fuse_hidden"].iter().any(|mark| {
        let digits = name.strip_prefix(mark).unwrap_or("");
        digits.len() >= 16 && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
    });
    deleted || is_draft(name) || writer_of(name).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temporary_names_contain_their_writer() {
        let ours = ProcessIdentity::new();
        let long = "表".repeat(85);
        for name in ["a", "a.tmp-b", ".tmp-x-1-2", "step-7", &long] {
            let temporary = name_for(name, &ours);
            assert!(temporary.len() <= NAME_BYTES_MAX, "{temporary}");
            assert_eq!(writer_of(&temporary).as_ref(), Some(&ours), "{temporary}");
            assert_ne!(temporary, name_for(name, &ProcessIdentity::new()));
        }
        for other in ["", "a", ".a", ".tmp-step-3", "a.tmp-h.m.b.1.2.3.4", ".a.tmp-h.m.b.1.2"] {
            assert_eq!(writer_of(other), None, "{other}");
            assert!(!is_hidden(other), "{other}");
        }
    }

    #[test]
    fn names_of_deleted_open_files_are_hidden() {
        assert!(is_hidden(".nfs000000000b0a1c2d00000001"));
        assert!(is_hidden(".fuse_hidden0000000300000001"));
        assert!(is_hidden(&name_for("a", &ProcessIdentity::new())));
        assert!(is_hidden(&draft_name("a")));
        for other in [".nfs", ".nfsroot", ".fuse_hidden", ".fuse_hidden_files_of_mine", "a.draft"] {
            assert!(!is_hidden(other), "{other}");
        }
    }
}
