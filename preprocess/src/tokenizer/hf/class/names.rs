//! Which class `AutoTokenizer.from_pretrained` takes for a folder, as transformers 5.24 does it.
//!
//! `tokenizer_config.json` names the class, or else `config.json` does. The type of the model in
//! `config.json` may decide otherwise: some types always read the file, a few have a class that
//! replaces the named one, and a folder that names no class has that of its type.

use serde_json::Value;

/// The class that is made of a folder; none for the one that reads `tokenizer.json` as it is.
/// `model` is `config.json`, `config` is `tokenizer_config.json`.
pub(super) fn class_of<'a>(
    model: &'a Value,
    config: &'a Value,
    is_byte_level: bool,
) -> Option<&'a str> {
    let kind = model["model_type"].as_str().unwrap_or_default();
    let named = [config, model].into_iter().find_map(|file| file["tokenizer_class"].as_str());
    let Some(named) = named.map(bare) else { return of_kind(kind) };
    if has_code(config) {
        return Some(named);
    }
    let is_replaced = [kind, model["model_name"].as_str().unwrap_or_default()]
        .iter()
        .any(|name| REPLACED.contains(name));
    let reads_file =
        GENERIC.contains(&kind) || named == "LlamaTokenizer" && is_byte_level && !is_replaced;
    if reads_file {
        return None;
    }
    let of_kind = registered(kind).filter(|_| is_replaced);
    Some(of_kind.unwrap_or(named))
}

/// The name of a class without the suffix that versions before 5 had.
pub(super) fn bare(class: &str) -> &str {
    class.strip_suffix("Fast").unwrap_or(class)
}

/// Whether the folder has code of its own for its tokenizer. It is not run; the class that is named
/// beside it is then taken whatever the type of the model is.
fn has_code(config: &Value) -> bool {
    match &config["auto_map"] {
        Value::Object(map) => map.get("AutoTokenizer").is_some_and(|code| !code.is_null()),
        code => code.is_array(),
    }
}

/// The class of a type of model, where the folder names none.
fn of_kind(kind: &str) -> Option<&'static str> {
    match kind {
        // Its configuration is that of GPT-2.
        "gpt-sw3" => Some("GPT2Tokenizer"),
        _ if WITHOUT_CONFIG.contains(&kind) => None,
        _ => registered(kind),
    }
}

fn registered(kind: &str) -> Option<&'static str> {
    let lists = |kinds: &str| kinds.split(' ').any(|one| one == kind);
    KINDS.iter().find(|(_, kinds)| lists(kinds)).map(|(class, _)| *class)
}

/// Types of models whose own class replaces the named one.
const REPLACED: [&str; 8] = [
    "camembertv2-base",
    "hyperclovax_vision_v2",
    "qwen2",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen4_exp",
    "siglip2",
];

/// Types of models whose tokenizer is always read from the file. That of Mistral's types is, where
/// the folder has no file of Mistral's own kind.
const GENERIC: [&str; 84] = [
    "EvollaModel",
    "arctic",
    "aria",
    "beam",
    "bigbird_pegasus",
    "camembertv2-base",
    "canary",
    "chatlm",
    "cohere_asr",
    "ernie4_5",
    "ernie4_5_moe",
    "flex_olmo",
    "fuyu",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm4v",
    "glm4v_moe",
    "glm_image",
    "glmasr",
    "got_ocr2",
    "gpt_bigcode",
    "gradium_phonon_tts",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "granitemoeshared",
    "h2ovl_chat",
    "hyperclovax",
    "hyperclovax_vlm",
    "internlm2",
    "internlm3",
    "iquestcoder",
    "jamba",
    "kimi_k25",
    "kimi_linear",
    "kosmos-2",
    "llava",
    "llava_next",
    "mimo_v2_flash",
    "minicpm3",
    "minicpm_ocr",
    "minicpmv",
    "minicpmv4_6",
    "minicpmv4_7",
    "minimax_m2",
    "ministral",
    "ministral3",
    "mistral",
    "mistral3",
    "mistral_large4",
    "mixtral",
    "modernbert",
    "modernbert-decoder",
    "molmo",
    "molmo2",
    "nemo_speechlm",
    "nemotron",
    "nvfp4",
    "nystromformer",
    "olmo2",
    "olmo3",
    "olmo_hybrid",
    "omniasr",
    "opencua",
    "openvla",
    "paddleocr_vl",
    "pegasus_x",
    "persimmon",
    "phi3",
    "phi3_v",
    "phimoe",
    "pix2struct",
    "pixtral",
    "pocket_tts",
    "smolvlm",
    "stablelm",
    "step3_vl",
    "umt5",
    "vipllava",
    "voxtral",
    "voxtral_realtime",
    "xlm-roberta-xl",
];

/// Types of models without a configuration of their own.
const WITHOUT_CONFIG: [&str; 20] = [
    "barthez",
    "bartpho",
    "bert-japanese",
    "bertweet",
    "byt5",
    "code_llama",
    "cpm",
    "herbert",
    "mbart50",
    "mega",
    "mluke",
    "myt5",
    "nezha",
    "nllb",
    "nougat",
    "phobert",
    "qdqbert",
    "realm",
    "retribert",
    "wav2vec2_phoneme",
];

/// Classes and the types of models that they are registered for.
const KINDS: [(&str, &str); 88] = [
    ("AlbertTokenizer", "albert yoso"),
    ("BarthezTokenizer", "barthez"),
    ("BartphoTokenizer", "bartpho"),
    ("BertGenerationTokenizer", "bert-generation"),
    ("BertJapaneseTokenizer", "bert-japanese"),
    (
        "BertTokenizer",
        "align bark bert blip bros chinese_clip convbert distilbert electra ernie flava \
         git grounding-dino layoutlm lxmert megatron-bert mm-grounding-dino mobilebert \
         nezha nomic_bert qdqbert realm retribert squeezebert tvp vilt visual_bert",
    ),
    ("BertweetTokenizer", "bertweet"),
    ("BigBirdTokenizer", "big_bird"),
    ("BioGptTokenizer", "biogpt"),
    ("BlenderbotSmallTokenizer", "blenderbot-small"),
    ("BlenderbotTokenizer", "blenderbot"),
    ("ByT5Tokenizer", "byt5"),
    (
        "CLIPTokenizer",
        "aimv2 clip clipseg groupvit omdet-turbo oneformer owlv2 owlvit sam3 sam3_video \
         xclip",
    ),
    ("CTRLTokenizer", "ctrl"),
    ("CamembertTokenizer", "camembert"),
    ("CanineTokenizer", "canine"),
    ("ClvpTokenizer", "clvp"),
    ("CodeLlamaTokenizer", "code_llama"),
    ("CohereTokenizer", "aya_vision cohere cohere2"),
    ("CpmAntTokenizer", "cpmant"),
    ("CpmTokenizer", "cpm"),
    ("DPRQuestionEncoderTokenizer", "dpr rag"),
    ("DebertaTokenizer", "deberta"),
    ("DebertaV2Tokenizer", "deberta-v2"),
    ("DiaTokenizer", "dia"),
    ("EsmTokenizer", "esm"),
    ("EsmcTokenizer", "esmc esmfold2"),
    ("FNetTokenizer", "fnet"),
    ("FSMTTokenizer", "fsmt"),
    ("FastSpeech2ConformerTokenizer", "fastspeech2_conformer"),
    ("FlaubertTokenizer", "flaubert"),
    ("FunnelTokenizer", "funnel"),
    (
        "GPT2Tokenizer",
        "blip-2 codegen dbrx emu3 gpt2 gpt_neo gptj hyperclovax_vision_v2 instructblip \
         instructblipvideo jais2 opt phi starcoder2",
    ),
    ("GPTNeoXJapaneseTokenizer", "gpt_neox_japanese"),
    ("GPTNeoXTokenizer", "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm"),
    ("GPTSw3Tokenizer", "gpt-sw3"),
    (
        "GemmaTokenizer",
        "diffusion_gemma gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text \
         recurrent_gemma shieldgemma2 t5gemma zaya",
    ),
    ("HerbertTokenizer", "herbert"),
    ("LasrTokenizer", "lasr_ctc lasr_encoder"),
    ("LayoutLMv2Tokenizer", "layoutlmv2"),
    ("LayoutLMv3Tokenizer", "layoutlmv3"),
    ("LayoutXLMTokenizer", "layoutxlm"),
    ("LlamaTokenizer", "idefics idefics2"),
    ("LukeTokenizer", "luke"),
    ("M2M100Tokenizer", "m2m_100"),
    ("MBart50Tokenizer", "mbart50"),
    ("MBartTokenizer", "mbart"),
    ("MLukeTokenizer", "mluke"),
    ("MPNetTokenizer", "mpnet"),
    ("MarianTokenizer", "marian"),
    ("MarkupLMTokenizer", "markuplm"),
    ("MgpstrTokenizer", "mgp-str"),
    ("MyT5Tokenizer", "myt5"),
    ("NllbTokenizer", "nllb nllb-moe"),
    ("NougatTokenizer", "nougat pp_formulanet"),
    ("OpenAIGPTTokenizer", "openai-gpt"),
    ("PLBartTokenizer", "plbart"),
    (
        "ParakeetTokenizer",
        "granite_speech5_ctc nemotron3_5_asr nemotron_asr_streaming omniasr_ctc \
         parakeet_ctc parakeet_rnnt parakeet_tdt",
    ),
    ("PegasusTokenizer", "pegasus"),
    ("PerceiverTokenizer", "perceiver"),
    ("PhobertTokenizer", "phobert"),
    ("ProphetNetTokenizer", "prophetnet"),
    (
        "Qwen2Tokenizer",
        "audioflamingo3 colqwen2 cosmos3_omni dots3_note fun_asr_nano hunyuan_vl internvl \
         lighton_ocr moss_transcribe_diarize ovis2 qianfan_ocr qwen2 qwen2_5_omni \
         qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 qwen3_asr qwen3_moe qwen3_next \
         qwen3_omni_moe qwen3_vl qwen3_vl_moe vibevoice",
    ),
    ("Qwen3_5Tokenizer", "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp"),
    ("ReformerTokenizer", "reformer"),
    ("RemBertTokenizer", "rembert"),
    ("RoCBertTokenizer", "roc_bert"),
    ("RoFormerTokenizer", "roformer"),
    (
        "RobertaTokenizer",
        "bart bridgetower clap data2vec-text florence2 ibert led lilt longformer mega mra \
         mvp roberta roberta-prelayernorm",
    ),
    ("SeamlessM4TTokenizer", "seamless_m4t seamless_m4t_v2"),
    ("Siglip2Tokenizer", "siglip2"),
    ("SiglipTokenizer", "siglip"),
    ("Speech2TextTokenizer", "speech_to_text"),
    ("SpeechT5Tokenizer", "speecht5"),
    ("SplinterTokenizer", "splinter"),
    ("T5Tokenizer", "mt5 musicgen musicgen_melody switch_transformers t5"),
    ("TapasTokenizer", "tapas"),
    ("Tipsv2Tokenizer", "tipsv2"),
    ("UdopTokenizer", "udop"),
    ("VideoPrismTokenizer", "videoprism"),
    ("VitsTokenizer", "vits"),
    (
        "Wav2Vec2CTCTokenizer",
        "data2vec-audio hubert unispeech unispeech-sat wav2vec2 wav2vec2-bert \
         wav2vec2-conformer",
    ),
    ("Wav2Vec2PhonemeCTCTokenizer", "wav2vec2_phoneme"),
    ("WhisperTokenizer", "whisper"),
    ("XGLMTokenizer", "xglm"),
    ("XLMRobertaTokenizer", "gte jina_embeddings_v3 metaclip_2 trocr xlm-roberta xmod"),
    ("XLMTokenizer", "xlm"),
    ("XLNetTokenizer", "xlnet"),
];
