//! The striping layout of a Lustre file or folder, read and set through its client, without a
//! library of Lustre.
//!
//! Layouts are `lov_user_md` of `lustre_user.h`: plain ones, by version 1 or with a pool of targets
//! by version 3, and composites, whose components each have a plain layout (progressive file
//! layouts). They are read from the attribute `lustre.lov`. A plain one is set by an `ioctl`, as
//! `lfs setstripe` does, a composite by that attribute.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

pub use crate::fs::stripe_advice::{Purpose, Recommendation};

use crate::fs::detect;
use crate::sys::syscalls;
use crate::{ByteSize, Error, Result};

/// The striping layout of a file, or of new files in a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Striping {
    /// The components, from the first byte to the end of the file. A plain layout has one.
    pub parts: Vec<LayoutComponent>,
}

/// A component of a layout: a part of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutComponent {
    /// Its first byte.
    pub start: u64,
    /// One past its last byte; the largest number is the end of the file.
    pub end: u64,
    /// Stripe size in bytes; 0 for the default of the file system.
    pub stripe_bytes: u32,
    /// Targets; 0 for the default, [`LayoutComponent::ALL`] for all.
    pub stripe_count: u16,
    /// The pool that targets are taken from; empty for any.
    pub pool: String,
    /// Whether it is stored on the metadata target, with the file's name.
    pub on_mdt: bool,
    /// Indices of the targets, in the order of stripes. Empty if it has no objects yet.
    pub targets: Vec<u32>,
}

/// Magic numbers of `lustre.lov`: a plain layout, one with a pool of targets, and a composite.
const LOV_V1: u32 = 0x0bd1_0bd0;
const LOV_V3: u32 = 0x0bd3_0bd0;
const LOV_COMPOSITE: u32 = 0x0bd6_0bd0;

/// Bytes before the targets of a plain layout, of one target, and of the header and of an entry of
/// a composite.
const V1_BYTES: usize = 32;
const V3_BYTES: usize = 48;
const TARGET_BYTES: usize = 24;
const COMPOSITE_BYTES: usize = 32;
const ENTRY_BYTES: usize = 48;

/// Bytes of a pool's name, of which the last is a zero.
const POOL_BYTES: usize = V3_BYTES - V1_BYTES;

/// An entry whose objects exist.
const ENTRY_INITIALISED: u32 = 0x10;

/// Patterns: over targets, and on the metadata target.
const RAID0: u32 = 1;
const ON_MDT: u32 = 0x100;

/// Any target may be the first.
const ANY_TARGET: u16 = u16::MAX;

/// The most targets a file may have, and more entries than any layout in use.
const TARGETS_MAX: usize = 2000;
const ENTRIES_MAX: usize = 1024;

/// Lustre takes multiples of 64 KiB.
const STRIPE_BYTES_MULTIPLE: u32 = 64 << 10;

/// The open flag that creates a file without objects until its layout is set: `O_LOV_DELAY_CREATE`
/// of `lustre_user.h`. It has no effect on regular files elsewhere.
pub(crate) const DELAY_CREATE: i32 = 0o100_000_000 | libc::O_NOCTTY | libc::O_ASYNC;

pub(crate) const ATTRIBUTE: &std::ffi::CStr = c"lustre.lov";

impl LayoutComponent {
    /// A [`LayoutComponent::stripe_count`] of all targets.
    pub const ALL: u16 = u16::MAX;

    /// A complete file over this many targets.
    #[must_use]
    pub fn whole(stripe_count: u16, stripe_bytes: u32) -> Self {
        LayoutComponent {
            start: 0,
            end: u64::MAX,
            stripe_bytes,
            stripe_count,
            pool: String::new(),
            on_mdt: false,
            targets: Vec::new(),
        }
    }

    /// The target that has the byte at this offset of the file, if this component covers it.
    #[must_use]
    pub fn target(&self, offset: u64) -> Option<u32> {
        if offset < self.start || offset >= self.end || self.targets.is_empty() {
            return None;
        }
        let stripe = offset.checked_div(u64::from(self.stripe_bytes))?;
        Some(self.targets[(stripe % self.targets.len() as u64) as usize]) // fits: below the length
    }

    /// `struct lov_user_md_v1`: magic, pattern, owner, stripe size, count, first target; or `_v3`,
    /// which is followed by a pool name.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; if self.pool.is_empty() { V1_BYTES } else { V3_BYTES }];
        let magic = if self.pool.is_empty() { LOV_V1 } else { LOV_V3 };
        bytes[0..4].copy_from_slice(&magic.to_le_bytes());
        bytes[4..8].copy_from_slice(&if self.on_mdt { ON_MDT } else { RAID0 }.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.stripe_bytes.to_le_bytes());
        bytes[28..30].copy_from_slice(&self.stripe_count.to_le_bytes());
        bytes[30..32].copy_from_slice(&ANY_TARGET.to_le_bytes());
        if !self.pool.is_empty() {
            bytes[V1_BYTES..V1_BYTES + self.pool.len()].copy_from_slice(self.pool.as_bytes());
        }
        bytes
    }

    fn parse(lov: &[u8], start: u64, end: u64) -> Option<Self> {
        let targets_at = match u32_at(lov, 0)? {
            LOV_V1 => V1_BYTES,
            LOV_V3 => V3_BYTES,
            _ => return None,
        };
        let (pattern, stripe_bytes) = (u32_at(lov, 4)?, u32_at(lov, 24)?);
        let stripe_count = u16_at(lov, 28)?;
        if start > end {
            return None;
        }
        let pool = if targets_at == V3_BYTES { lov.get(V1_BYTES..V3_BYTES)? } else { &[] };
        let pool = String::from_utf8_lossy(pool).trim_end_matches('\0').to_owned();
        // A file without objects yet has the requested count, and no targets.
        let count = usize::from(stripe_count);
        let target = |i| u32_at(lov, targets_at + i * TARGET_BYTES + 20);
        let is_complete = count <= TARGETS_MAX && lov.len() >= targets_at + count * TARGET_BYTES;
        let targets =
            if is_complete { (0..count).map(target).collect::<Option<_>>()? } else { Vec::new() };
        let on_mdt = pattern & ON_MDT != 0;
        Some(LayoutComponent { start, end, stripe_bytes, stripe_count, pool, on_mdt, targets })
    }

    fn check(&self) -> std::result::Result<(), String> {
        let LayoutComponent { end, stripe_bytes, stripe_count, pool, on_mdt, .. } = self;
        if !stripe_bytes.is_multiple_of(STRIPE_BYTES_MULTIPLE) {
            return Err(format!(
                "expected stripes of a multiple of 64 KiB, found {stripe_bytes} bytes"
            ));
        }
        if *stripe_count != LayoutComponent::ALL && usize::from(*stripe_count) > TARGETS_MAX {
            return Err(format!("expected at most {TARGETS_MAX} stripes, found {stripe_count}"));
        }
        let unit = u64::from((*stripe_bytes).max(STRIPE_BYTES_MULTIPLE));
        if *end != u64::MAX && !end.is_multiple_of(unit) {
            return Err(format!(
                "expected a component that ends at a multiple of {unit}, its stripe size, found \
                 end {end}"
            ));
        }
        let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if pool.len() >= POOL_BYTES || !pool.bytes().all(is_valid) {
            let len_max = POOL_BYTES - 1;
            return Err(format!(
                "expected a pool name of at most {len_max} letters, digits, '.', '_' or '-', found \
                 '{pool}'"
            ));
        }
        if *on_mdt && (self.start > 0 || *end == u64::MAX || *stripe_count > 0) {
            let layout = "the first component, with an end and without a stripe count";
            return Err(format!("expected on the metadata target: {layout}"));
        }
        Ok(())
    }
}

impl Striping {
    /// Reads the layout of a file, or of new files in a folder. `None`: the folder has no layout of
    /// its own, and uses the default of the file system.
    ///
    /// # Errors
    /// [`Error::Refused`] on any other file system; errors of the file system; [`Error::Corrupt`]
    /// for an unknown kind of layout.
    pub fn of(path: &Path) -> Result<Option<Self>> {
        let file = open(path)?;
        Self::read(&file, path)
    }

    fn read(file: &File, path: &Path) -> Result<Option<Self>> {
        let object = path.display().to_string();
        let lov = match syscalls::attribute(file, ATTRIBUTE) {
            Ok(lov) => lov,
            Err(e) if e.raw_os_error() == Some(libc::ENODATA) => return Ok(None),
            Err(e) => return Err(Error::from_io("read", format!("the layout of {object}"), e)),
        };
        let unknown = || Error::Corrupt {
            found: format!("{} bytes that start with {:02x?}", lov.len(), &lov[..lov.len().min(8)]),
            expected: "lov_user_md version 1 or 3, or a composite layout".to_owned(),
            object,
            offset: 0,
        };
        Self::parse(&lov).map(Some).ok_or_else(unknown)
    }

    /// Parses the attribute `lustre.lov`. `None` if it is no layout.
    #[must_use]
    pub fn parse(lov: &[u8]) -> Option<Self> {
        if u32_at(lov, 0)? != LOV_COMPOSITE {
            return Some(Striping { parts: vec![LayoutComponent::parse(lov, 0, u64::MAX)?] });
        }
        let entries = usize::from(u16_at(lov, 14)?);
        if entries > ENTRIES_MAX {
            return None;
        }
        let mut parts = Vec::with_capacity(entries);
        for i in 0..entries {
            let entry = lov.get(COMPOSITE_BYTES + i * ENTRY_BYTES..)?.get(..ENTRY_BYTES)?;
            let (start, end) = (u64_at(entry, 8)?, u64_at(entry, 16)?);
            let first = u32_at(entry, 24)? as usize;
            let last = first.checked_add(u32_at(entry, 28)? as usize)?;
            let mut part = LayoutComponent::parse(lov.get(first..last)?, start, end)?;
            if u32_at(entry, 4)? & ENTRY_INITIALISED == 0 {
                part.targets.clear();
            }
            parts.push(part);
        }
        Some(Striping { parts })
    }

    /// Encodes it for Lustre. A single component over the complete file is a plain layout.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        if let [part] = &self.parts[..] {
            return part.to_bytes();
        }
        let blobs: Vec<_> = self.parts.iter().map(LayoutComponent::to_bytes).collect();
        let mut bytes = vec![0; COMPOSITE_BYTES + self.parts.len() * ENTRY_BYTES];
        bytes[0..4].copy_from_slice(&LOV_COMPOSITE.to_le_bytes());
        // fits: a composite that was checked has ENTRIES_MAX entries of 48 bytes at most
        let count = self.parts.len() as u16;
        bytes[14..16].copy_from_slice(&count.to_le_bytes());
        for (i, (part, blob)) in self.parts.iter().zip(&blobs).enumerate() {
            let at = bytes.len() as u32; // fits: as above
            bytes.extend(blob);
            let entry = &mut bytes[COMPOSITE_BYTES + i * ENTRY_BYTES..][..ENTRY_BYTES];
            entry[8..16].copy_from_slice(&part.start.to_le_bytes());
            entry[16..24].copy_from_slice(&part.end.to_le_bytes());
            entry[24..28].copy_from_slice(&at.to_le_bytes());
            entry[28..32].copy_from_slice(&(blob.len() as u32).to_le_bytes()); // fits: V3_BYTES
        }
        let size = bytes.len() as u32; // fits: as above
        bytes[4..8].copy_from_slice(&size.to_le_bytes());
        bytes
    }

    /// Checks for values that Lustre would refuse.
    ///
    /// # Errors
    /// The component and what is wrong with it.
    pub fn check(&self) -> std::result::Result<(), String> {
        if self.parts.is_empty() || self.parts.len() > ENTRIES_MAX {
            return Err(format!(
                "expected 1 to {ENTRIES_MAX} components, found {}",
                self.parts.len()
            ));
        }
        let mut start = 0;
        for part in &self.parts {
            if part.start != start || part.end <= part.start {
                return Err(format!(
                    "expected a component that starts at {start} and ends later, found {} to {}",
                    part.start, part.end
                ));
            }
            part.check()?;
            start = part.end;
        }
        if start == u64::MAX {
            return Ok(());
        }
        Err(format!("expected a last component to the end of the file, found end {start}"))
    }

    /// Sets this layout on a folder for its new files, or creates an empty file with it; and reads
    /// it back. The layout of an existing file is fixed.
    ///
    /// A site may restrict layouts to `lfs`; the call then succeeds without effect. So compare the
    /// result, by [`Striping::grants`].
    ///
    /// # Errors
    /// [`Error::BadUrl`] for a layout that Lustre would refuse, [`Error::Exists`] for an existing
    /// file, [`Error::Refused`] on any other file system, and errors of the file system.
    pub fn set(&self, path: &Path) -> Result<Option<Self>> {
        let object = path.display().to_string();
        self.check().map_err(|reason| Error::BadUrl {
            url: format!("stripe layout of {object}"),
            reason,
        })?;
        if path.is_dir() {
            let folder = open(path)?;
            self.apply(&folder, &object)?;
            return Self::read(&folder, path);
        }
        require_lustre(&crate::fs::filesystem::folder_of(path))?;
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).custom_flags(DELAY_CREATE);
        let file = options.open(path).map_err(|e| Error::from_io("create", object.clone(), e))?;
        let set = self.apply(&file, &object).and_then(|()| Self::read(&file, path));
        if set.is_err() {
            // The first error is the one to report.
            let _ = std::fs::remove_file(path);
        }
        set
    }

    fn apply(&self, file: &File, object: &str) -> Result<()> {
        let bytes = self.to_bytes();
        let outcome = match &self.parts[..] {
            [_] => syscalls::set_stripes(file, &bytes),
            _ => syscalls::set_attribute(file, ATTRIBUTE, &bytes),
        };
        outcome.map_err(|e| Error::from_io("set", format!("the layout of {object}"), e))
    }

    /// Whether this layout, which was read back, satisfies the requested one. Defaults in the
    /// request match any value.
    #[must_use]
    pub fn grants(&self, requested: &Self) -> bool {
        let grants = |(found, expected): (&LayoutComponent, &LayoutComponent)| {
            let all = expected.stripe_count == LayoutComponent::ALL && found.stripe_count > 0;
            (found.start, found.end) == (expected.start, expected.end)
                && (expected.stripe_bytes == 0 || expected.stripe_bytes == found.stripe_bytes)
                && (expected.stripe_count == 0
                    || all
                    || expected.stripe_count == found.stripe_count)
                && (expected.pool.is_empty() || expected.pool == found.pool)
                && expected.on_mdt == found.on_mdt
        };
        self.parts.len() == requested.parts.len()
            && self.parts.iter().zip(&requested.parts).all(grants)
    }
}

impl fmt::Display for Striping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, part) in self.parts.iter().enumerate() {
            write!(f, "{}{part}", if i > 0 { "; " } else { "" })?;
        }
        Ok(())
    }
}

impl fmt::Display for LayoutComponent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if (self.start, self.end) != (0, u64::MAX) {
            write!(f, "from {} ", ByteSize(self.start))?;
            match self.end {
                u64::MAX => f.write_str("to the end: ")?,
                end => write!(f, "to {}: ", ByteSize(end))?,
            }
        }
        match (self.on_mdt, self.stripe_count) {
            (true, _) => return f.write_str("on the metadata target"),
            (_, 0) => f.write_str("the default number of stripes")?,
            (_, LayoutComponent::ALL) => f.write_str("stripes on all targets")?,
            (_, 1) => f.write_str("1 stripe")?,
            (_, count) => write!(f, "{count} stripes")?,
        }
        match self.stripe_bytes {
            0 => f.write_str(" of the default size")?,
            bytes => write!(f, " of {}", ByteSize(bytes.into()))?,
        }
        if !self.pool.is_empty() {
            write!(f, " in the pool {}", self.pool)?;
        }
        Ok(())
    }
}

/// The number of targets of the file system, if this client shows it without root.
#[must_use]
pub fn target_count() -> Option<u32> {
    let clients = std::fs::read_dir("/sys/fs/lustre/lov").ok()?;
    let count = |entry: std::fs::DirEntry| {
        let text = std::fs::read_to_string(entry.path().join("numobd")).ok()?;
        text.trim().parse().ok()
    };
    clients.flatten().filter_map(count).max()
}

fn open(path: &Path) -> Result<File> {
    require_lustre(path)?;
    let object = path.display().to_string();
    File::open(path).map_err(|e| Error::from_io("open", object, e))
}

fn require_lustre(path: &Path) -> Result<()> {
    let object = path.display().to_string();
    let status =
        syscalls::file_system(path).map_err(|e| Error::from_io("stat", object.clone(), e))?;
    match detect::kind_of(status.magic).0.as_str() {
        "lustre" => Ok(()),
        kind => Err(Error::Refused {
            way: format!("striping on {object}"),
            reason: format!("only Lustre has stripes, found {kind}"),
        }),
    }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

/// Whether a Lustre folder has a composite layout, which sites use to let striping grow with the
/// file.
pub(crate) fn is_composite(folder: &File) -> bool {
    let lov = syscalls::attribute(folder, ATTRIBUTE).ok();
    lov.and_then(|lov| u32_at(&lov, 0)) == Some(LOV_COMPOSITE)
}
