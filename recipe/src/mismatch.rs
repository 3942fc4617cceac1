use std::fmt;

/// An error of inputs that do not match: the config, the environment, the data, a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incompatible {
    /// What failed, as `cannot load run/ckpt/step-000000000120`.
    pub operation: String,
    /// What was expected and what was found, one item each.
    pub details: Vec<String>,
    /// The likely remedy: a command or a setting.
    pub hint: &'static str,
}

impl Incompatible {
    /// An error with one detail.
    #[must_use]
    pub fn new(
        operation: impl Into<String>,
        detail: impl Into<String>,
        hint: &'static str,
    ) -> Self {
        Incompatible { operation: operation.into(), details: vec![detail.into()], hint }
    }
}

impl fmt::Display for Incompatible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (between, last) = if self.details.len() == 1 { (" ", " ") } else { ("\n  ", "\n") };
        write!(f, "{}:", self.operation)?;
        for detail in &self.details {
            write!(f, "{between}{detail}")?;
        }
        write!(f, "{last}(hint: {})", self.hint)
    }
}

impl std::error::Error for Incompatible {}
