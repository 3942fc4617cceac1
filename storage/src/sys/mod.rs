//! System calls, aligned and mapped memory, and vector instructions: most of the crate's `unsafe`.

pub(crate) mod aligned_buffer;
#[expect(unsafe_code, reason = "buffers are disjoint parts of one mapping")]
pub(crate) mod buffer_pool;
#[expect(unsafe_code, reason = "a mapped file is a slice only if no process changes it")]
pub(crate) mod mapped;
#[cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "instructions that write past the cache")
)]
pub(crate) mod nontemporal;
#[cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "vector instructions, where the processor has them")
)]
pub(crate) mod simd;
#[expect(unsafe_code, reason = "system calls that std does not offer")]
pub(crate) mod syscalls;
