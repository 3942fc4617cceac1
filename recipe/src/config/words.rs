//! The values of keys that take one of a few words.

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
    /// The device that computes.
    ComputeOn {
        /// A GPU if the program is built for GPUs and finds one, else the CPU.
        #[default]
        Auto,
        /// The CPU.
        Cpu,
        /// One GPU per rank: the GPU whose index is the number of the rank on its node.
        Cuda,
    }
}

words! {
    /// The action on SIGTERM, SIGINT and SIGUSR1.
    OnSignal {
        /// Finishes the step, saves a checkpoint and exits with code 75.
        #[default]
        SaveAndExit,
    }
}

words! {
    /// The action on a loss spike.
    OnSpike {
        /// No action.
        Ignore,
        /// Logs the samples of the step.
        #[default]
        Warn,
        /// Ends the run with an error that names the samples of the step.
        Stop,
    }
}

words! {
    /// An architecture.
    Family {
        /// A decoder: GPT-2 and its successors.
        #[default]
        Gpt,
        /// An encoder and a decoder: T5 v1.1, CPM-2.
        T5,
        /// An encoder: BERT.
        Bert,
    }
}

words! {
    /// The activation function of the feed-forward block.
    Activation {
        /// GELU, computed with the error function.
        Gelu,
        /// GELU in its tanh approximation.
        #[default]
        GeluTanh,
        /// GEGLU with the tanh approximation of GELU: two input matrices, one output matrix.
        GegluTanh,
        /// ReLU.
        Relu,
        /// SwiGLU: two input matrices, one output matrix.
        Swiglu,
    }
}

impl Activation {
    /// Whether a second input matrix gates the first.
    #[must_use]
    pub fn is_gated(self) -> bool {
        matches!(self, Activation::GegluTanh | Activation::Swiglu)
    }
}

words! {
    /// The norm before each block; in BERT after it.
    Norm {
        /// LayerNorm: mean 0 and variance 1, then a gain and a bias.
        #[default]
        Layernorm,
        /// RMSNorm: mean square 1, then a gain.
        Rmsnorm,
    }
}

words! {
    /// The position encoding.
    Positions {
        /// A learned vector per position, added to the word embedding.
        #[default]
        Learned,
        /// A learned number per head and distance bucket, added to the attention logits (T5).
        RelativeBias,
        /// Rotary embedding: queries and keys are rotated by an angle that grows with the position.
        Rope,
        /// No position encoding.
        None,
    }
}

words! {
    /// The training objective.
    Objective {
        /// Predicts the next token.
        #[default]
        Lm,
        /// Predicts spans that are masked at run time.
        SpanCorruption,
        /// Predicts the spans in the three token files of CPM-2.
        Encdec,
        /// Predicts masked tokens, and whether two segments are swapped.
        Mlm,
    }
}

impl Objective {
    /// Whether tokens are masked at run time.
    #[must_use]
    pub fn hides(self) -> bool {
        matches!(self, Objective::SpanCorruption | Objective::Mlm)
    }
}

words! {
    /// The distribution of the lengths of masked spans, from 1 to n words.
    MaskLengths {
        /// In proportion to 1/n.
        #[default]
        ShorterFirst,
        /// The reverse: the longest is the most likely.
        LongerFirst,
        /// Geometric with p = 0.2, truncated at the longest.
        Geometric,
    }
}

words! {
    /// The order in which a pipeline computes its micro-batches.
    Schedule {
        /// One forward, one backward: a stage holds the activations of at most `pp` micro-batches.
        #[default]
        #[serde(rename = "1f1b")]
        OneForwardOneBackward,
        /// 1F1B over `virtual_stages` stages per rank: a smaller bubble, more messages.
        Interleaved,
        /// All forward passes, then all backward passes: holds the activations of all
        /// micro-batches.
        Gpipe,
    }
}

words! {
    /// The order of the gradient sum over replicas.
    Reduce {
        /// A tree over the micro-batches of the step: the same bits for every number of replicas
        /// that is a power of two.
        #[default]
        Tree,
        /// The order of the collective library: any number of replicas, other bits for each number.
        Ring,
    }
}

words! {
    /// The layers that the backward pass recomputes.
    RecomputeMode {
        /// No layer.
        #[default]
        None,
        /// Each layer, from its input.
        Full,
    }
}

words! {
    /// The number format of matrix products.
    Dtype {
        /// 32-bit floats.
        #[default]
        Fp32,
        /// bfloat16, with fp32 master weights.
        Bf16,
        /// 16-bit floats, with fp32 master weights and a loss scale.
        Fp16,
    }
}

words! {
    /// The number format in which replicas exchange gradients.
    ReduceDtype {
        /// 32-bit floats.
        #[default]
        Fp32,
        /// bfloat16: half the traffic, lower precision.
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
    /// The schedule of the learning rate after the warm-up.
    LrStyle {
        /// Stays at the peak.
        Constant,
        /// Decays linearly.
        Linear,
        /// Decays along half a period of a cosine.
        #[default]
        Cosine,
        /// Decays with the inverse square root of the samples.
        InverseSqrt,
        /// Decays exponentially to half the peak over the length of the decay.
        Exponential,
        /// Warm-up, stable, decay: stays at the peak and decays at the end.
        Wsd,
        /// Rises linearly from `floor` to `peak`, to find the rate at which training diverges.
        RangeTest,
    }
}

words! {
    /// How the schedule reaches the floor.
    FloorMode {
        /// The curve is scaled to end at the floor.
        #[default]
        Rescale,
        /// The curve decays towards 0 and stops at the floor; samples are counted as in Megatron
        /// v1.
        Clamp,
    }
}

words! {
    /// The curve of the warm-up.
    WarmupShape {
        /// Linear.
        #[default]
        Linear,
        /// Logarithmic, the default of DeepSpeed.
        Log,
    }
}

words! {
    /// The part of the schedule that is one step late.
    Lag {
        /// None: a step runs with its own rate.
        #[default]
        None,
        /// The warm-up, and the first rate is 0, as with `WarmupCosineLR` of DeepSpeed.
        Warmup,
        /// All of it, as with `WarmupLR` and `WarmupDecayLR` of DeepSpeed.
        All,
    }
}

words! {
    /// The curve of the final decay of `wsd`.
    AnnealStyle {
        /// Linear.
        Linear,
        /// Half a period of a cosine.
        Cosine,
        /// `2 · 2^(−r) − 1`.
        #[default]
        Exponential,
        /// `1 − √r`.
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
        /// The number of consumed samples.
        Data,
        /// The random streams.
        Rng,
        /// The position in the learning rate schedule.
        Schedule,
    }
}

impl Part {
    /// All parts.
    pub const ALL: [Part; 5] = [Part::Model, Part::Optim, Part::Data, Part::Rng, Part::Schedule];
}

words! {
    /// How a step is timed.
    Timers {
        /// No timing.
        Off,
        /// The time of each phase, in the log.
        #[default]
        Phases,
        /// The time of each phase, and every action as a Chrome trace in the folder of the run.
        Trace,
    }
}
