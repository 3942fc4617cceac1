//! GPT-2's decoder: learned positions, norm before each block, biases everywhere, GELU by its tanh
//! formula, one matrix for the word embedding and the head.
//!
//! Parameters are a plain list of tensors in the order of [`GptShape::params`], and the functions
//! here take slices of it: the same code runs on the f32 weights and on their bf16 copies, and the
//! weights are owned in one place. Names, shapes and orientation are those of Hugging Face's
//! `GPT2LMHeadModel`, so that a checkpoint is exported by copying: matrices are stored
//! `[in, out]`, as its `Conv1D` has them, not `[out, in]` as a `Linear` would. The output axis of
//! `c_attn` is `[3, heads, head_dim]`, row-major: all queries, all keys, all values. The vocabulary
//! is padded to a multiple of 128; padding columns of the logits are minus infinity.
//!
//! In reading order: `shape` names the parameters, `init` gives them values, `gpt` is the network
//! up to its last norm, `head` the logits and the loss.

mod gpt;
mod head;
mod init;
mod shape;

pub use gpt::{Cache, hidden_states};
pub use head::{HEAD_CHUNK_ROWS, HeadGrad, LossTokens, logits, loss, loss_and_grad};
pub use init::initialize;
pub use shape::{GptShape, Init, ParamSpec};

/// Place of the word embedding, which is the head too, among the parameters.
pub const WTE: usize = 0;
const WPE: usize = 1;
