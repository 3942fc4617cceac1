//! The keywords with which Megatron would build one of Hugging Face's tokenizers.

use serde_json::Value;

use super::TokenizerSpec;

/// Keywords without further effect on ids. They are part of the identifiers, from which Megatron
/// makes the names of its caches.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Keywords {
    slow: bool,
    trust_remote_code: bool,
    without_special_tokens: bool,
}

impl Keywords {
    pub(super) fn of(spec: &TokenizerSpec) -> Self {
        Keywords {
            slow: spec.slow,
            trust_remote_code: spec.trust_remote_code,
            without_special_tokens: spec.without_special_tokens,
        }
    }

    /// Adds them, in Megatron's order and spelling.
    pub(super) fn add_to(self, identifiers: &mut Value) {
        identifiers["use_fast"] = python_bool(!self.slow);
        identifiers["trust_remote_code"] = python_bool(self.trust_remote_code);
        identifiers["include_special_tokens"] = python_bool(!self.without_special_tokens);
    }
}

fn python_bool(value: bool) -> Value {
    if value { "True".into() } else { "False".into() }
}
