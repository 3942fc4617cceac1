//! The words that keys take.

use serde::{Deserialize, Serialize};

/// An enum whose variants are written in kebab case.
macro_rules! words {
    ($(#[$about:meta])* $name:ident { $($(#[$of:meta])* $word:ident,)+ }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(rename_all = "kebab-case")]
        pub enum $name { $($(#[$of])* $word,)+ }
    };
}

words! {
    /// What computes.
    ComputeOn {
        /// A GPU where the program was built for them and there is one, else the CPU.
        #[default]
        Auto,
        /// The CPU.
        Cpu,
        /// A GPU a rank, by the rank's number on its machine.
        Cuda,
    }
}

words! {
    /// What SIGTERM, SIGINT and SIGUSR1 do.
    OnSignal {
        /// The step is finished and saved; the exit code is 75.
        #[default]
        SaveAndExit,
    }
}

words! {
    /// What a leap of the loss does.
    OnSpike {
        /// Nothing.
        Ignore,
        /// The log names the samples.
        #[default]
        Warn,
        /// The run ends with an error that names the samples.
        Stop,
    }
}

words! {
    /// An architecture.
    Family {
        /// A decoder: GPT-2, and with other words for its parts what came after it.
        #[default]
        Gpt,
        /// An encoder and a decoder: T5 v1.1, CPM-2.
        T5,
        /// An encoder.
        Bert,
    }
}

words! {
    /// What stands between the matrices of the feed-forward block.
    Activation {
        /// GELU by the error function.
        Gelu,
        /// GELU by its tanh formula.
        #[default]
        GeluTanh,
        /// A gate through GELU by its tanh formula: two matrices in, one out.
        GegluTanh,
        /// What is above 0.
        Relu,
        /// A gate through SiLU: two matrices in, one out.
        Swiglu,
    }
}

impl Activation {
    /// Whether a second matrix goes in, whose product gates the first.
    #[must_use]
    pub fn is_gated(self) -> bool {
        matches!(self, Activation::GegluTanh | Activation::Swiglu)
    }
}

words! {
    /// The norm before, or in BERT after, each block.
    Norm {
        /// Mean 0 and variance 1, then a gain and a bias.
        #[default]
        Layernorm,
        /// Mean square 1, then a gain.
        Rmsnorm,
    }
}

words! {
    /// How a token knows its place.
    Positions {
        /// A learned vector for each position, added to the word's.
        #[default]
        Learned,
        /// A learned number for each head and distance, added to the attention's logits (T5).
        RelativeBias,
        /// Queries and keys are turned by an angle that grows with the position.
        Rope,
        /// It does not.
        None,
    }
}

words! {
    /// What a model learns to say.
    Objective {
        /// The next token.
        #[default]
        Lm,
        /// The spans of sentences that are hidden as they are read.
        SpanCorruption,
        /// The spans that CPM-2's three token files have hidden.
        Encdec,
        /// The masked tokens, and whether the second sentence follows the first.
        Mlm,
    }
}

impl Objective {
    /// Whether it hides tokens of sentences as they are read.
    #[must_use]
    pub fn hides(self) -> bool {
        matches!(self, Objective::SpanCorruption | Objective::Mlm)
    }
}

words! {
    /// How long the runs of words are that are hidden at once, of 1 to n words.
    MaskLengths {
        /// In proportion to 1/n.
        #[default]
        ShorterFirst,
        /// The other way around.
        LongerFirst,
        /// Geometric with p = 0.2, cut at the longest.
        Geometric,
    }
}

words! {
    /// In what order a pipeline computes its micro-batches.
    Schedule {
        /// One forward, one backward: as few activations as stages.
        #[default]
        #[serde(rename = "1f1b")]
        OneForwardOneBackward,
        /// The same over `virtual_stages` pieces a rank: a smaller bubble, more messages.
        Interleaved,
        /// All forwards, then all backwards: every activation is kept.
        Gpipe,
    }
}

words! {
    /// How gradients are summed over replicas.
    Reduce {
        /// Along one tree over the micro-batches of the step: the same bits for any number of
        /// replicas that is a power of two.
        #[default]
        Tree,
        /// As the library does it: any number of replicas, each with bits of its own.
        Ring,
    }
}

words! {
    /// What the backward pass computes again instead of keeping it.
    RecomputeMode {
        /// Nothing.
        #[default]
        None,
        /// Layers from their inputs.
        Full,
    }
}

words! {
    /// The numbers of the matrix multiplications.
    Dtype {
        /// 32-bit floats throughout.
        #[default]
        Fp32,
        /// bfloat16, from fp32 master weights.
        Bf16,
        /// Half floats, from fp32 master weights, with a loss scale.
        Fp16,
    }
}

words! {
    /// The numbers in which gradients are summed over replicas.
    ReduceDtype {
        /// 32-bit floats.
        #[default]
        Fp32,
        /// bfloat16: half the traffic, fewer bits.
        Bf16,
    }
}

words! {
    /// An optimizer.
    OptimName {
        /// Adam with decoupled weight decay.
        #[default]
        Adamw,
    }
}

words! {
    /// The course of the learning rate after the warm-up.
    LrStyle {
        /// Stays at the peak.
        Constant,
        /// Falls along a line.
        Linear,
        /// Falls along half a period of a cosine.
        #[default]
        Cosine,
        /// Falls with the root of the samples.
        InverseSqrt,
        /// Halves over the length of the decay.
        Exponential,
        /// Stays at the peak and falls at the end: warm-up, stable, decay.
        Wsd,
        /// Rises along a line from `floor` to `peak`: to see where training breaks.
        RangeTest,
    }
}

words! {
    /// What the floor does to the way down.
    FloorMode {
        /// The way ends at the floor.
        #[default]
        Rescale,
        /// The way is that to 0, cut off at the floor, and counted as the first Megatron did.
        Clamp,
    }
}

words! {
    /// The way up.
    WarmupShape {
        /// Along a line.
        #[default]
        Linear,
        /// Along a logarithm, DeepSpeed's default.
        Log,
    }
}

words! {
    /// The last fall of `wsd`.
    AnnealStyle {
        /// Along a line.
        Linear,
        /// Along half a period of a cosine.
        Cosine,
        /// Along `2 · 2^(−r) − 1`.
        #[default]
        Exponential,
        /// Along `1 − √r`.
        MinusSqrt,
    }
}

words! {
    /// A part of a checkpoint.
    Part {
        /// The weights.
        #[default]
        Model,
        /// The moments and the loss scale.
        Optim,
        /// How many samples have been consumed.
        Data,
        /// The streams of random numbers.
        Rng,
        /// Where the learning rate is.
        Schedule,
    }
}

impl Part {
    /// All parts.
    pub const ALL: [Part; 5] = [Part::Model, Part::Optim, Part::Data, Part::Rng, Part::Schedule];
}

words! {
    /// How closely a step's time is looked at.
    Timers {
        /// Not at all.
        Off,
        /// By phase, in the log.
        #[default]
        Phases,
        /// Every action, as a Chrome trace in the run's folder.
        Trace,
    }
}
