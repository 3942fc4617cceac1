use std::fmt;
use std::ptr::{self, NonNull};
use std::time::Duration;

use tch::Tensor;

use super::Group;
use crate::Result;
use crate::ffi::{self, Call, RawWork, check};

/// An operation in flight. It reads or writes its tensors until [`Work::wait`] returns, and keeps
/// them alive. Drop waits, and the error is lost.
#[must_use = "dropped, it waits and its error is lost"]
pub struct Work {
    raw: NonNull<RawWork>,
    waited: bool,
    op: &'static str,
    group: Group,
}

// SAFETY: c10d's work may be waited for and dropped on any thread; we hand it from one to another.
unsafe impl Send for Work {}

impl Work {
    pub(super) fn start(
        group: &Group,
        op: &'static str,
        call: &Call,
        out: Option<&Tensor>,
        input: Option<&Tensor>,
    ) -> Result<Self> {
        let pointer = |tensor: Option<&Tensor>| tensor.map_or(ptr::null(), Tensor::as_ptr);
        let mut raw = ptr::null_mut();
        // SAFETY: the group is alive, the shim takes its own handles of the tensors, and `raw` has
        // room for one pointer.
        let code =
            unsafe { ffi::fb_start(group.raw(), call, pointer(out), pointer(input), &raw mut raw) };
        check(op, code)?;
        let raw = NonNull::new(raw).expect("the call succeeded");
        Ok(Work { raw, waited: false, op, group: group.clone() })
    }

    /// Waits until the operation is complete.
    ///
    /// # Errors
    /// [`crate::Error::Collective`] if a rank is missing after the timeout, or lost.
    pub fn wait(mut self) -> Result<()> {
        self.waited = true;
        // SAFETY: made by `fb_start`, and freed only when dropped.
        let code = unsafe { ffi::fb_work_wait(self.raw.as_ptr()) };
        check(self.op, code)
    }

    /// Whether it is complete or has failed: then waiting takes no time. Sends and receives over
    /// TCP report this only in [`Work::wait`].
    #[must_use]
    pub fn is_done(&self) -> bool {
        // SAFETY: made by `fb_start`, and freed only when dropped.
        unsafe { ffi::fb_work_done(self.raw.as_ptr()) != 0 }
    }
}

/// How long threads of this process have waited for operations so far, including those between the
/// layers of tensor parallel ranks: the communication that computation did not hide. Operations of
/// GPUs are not included: there the device waits.
#[must_use]
pub fn waited() -> Duration {
    Duration::from_nanos(ffi::fb_waited_ns().unsigned_abs())
}

/// Waits until the current GPU has completed its work. Data that is read afterwards is valid;
/// without this call a failed operation would not be noticed.
///
/// # Errors
/// [`crate::Error::Collective`] if an operation of its groups takes longer than the
/// timeout, or has failed.
pub fn settle() -> Result<()> {
    check("wait for the GPU", ffi::fb_settle())
}

impl Drop for Work {
    fn drop(&mut self) {
        if !self.waited {
            // SAFETY: made by `fb_start`, and freed only below.
            unsafe { ffi::fb_work_wait(self.raw.as_ptr()) };
        }
        // SAFETY: the shim passed ownership of it, and no other code uses it any more.
        unsafe { ffi::fb_work_free(self.raw.as_ptr()) };
    }
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("op", &self.op).field("group", &self.group).finish()
    }
}
