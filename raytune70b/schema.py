"""The configuration: one dataclass per section, every key with its meaning, its default and its limits.

The defaults are the embedded default run (tiny, offline, two CPU cores); `conf/finetune.yaml` is written from this file,
and so is `--help`. The string under a field is its documentation. Limits stand beside the
field (`limited`), contradictions between fields in `contradictions.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional, Union

RANGE = 16.0
"""A sweep's range of learning rates reaches this factor below and above the run's own rate where it is not given."""


def limited(default: Any, low: float | None = None, high: float | None = None, choices: tuple = (), above: float | None = None) -> Any:
    """A field whose value must lie in [low, high], above `above`, or be one of `choices`."""
    return field(default=default, metadata={"low": low, "high": high, "choices": choices, "above": above})


def several(*default: Any) -> Any:
    """A list field."""
    return field(default_factory=lambda: list(default))


def mapping(**default: Any) -> Any:
    """A dictionary field."""
    return field(default_factory=lambda: dict(default))


@dataclass
class Run:
    name: str = "default"
    """The run's folder under `run.path`; the same name again continues the run."""
    path: str = "runs"
    """Where run folders live: a local or shared folder, or any pyarrow/fsspec URI such as s3://bucket/runs."""
    resume: str = limited("auto", choices=("auto", "never", "must"))
    """auto: continue the run when it has a checkpoint; never: refuse a run that has one; must: refuse to start from nothing."""
    seed: int = limited(17, low=0, high=2**62)
    """Seeds the order of the blocks, random weights and dropout."""
    hang_timeout_s: float = limited(600.0, above=0)
    """A worker without a sign of life for this many seconds is named with its stack, and the worker group restarts."""
    quiet: bool = False
    """Print warnings, errors and the closing table only."""


@dataclass
class Data:
    path: str = "data/sample"
    """The folder (or URI) of token blocks that `jobs/prepare.py` writes and `jobs/finetune.py` reads."""
    inputs: list[str] = several("sample")
    """Raw documents: files, folders, globs or URIs; `sample` is a small bilingual legal corpus made on the spot."""
    columns: dict[str, str] = mapping()
    """Your columns' names where they differ from text, instruction, input, output, question, answer, messages: {text: body}."""
    languages: list[str] = several("en", "fr")
    """Languages to keep, by code; documents that mix them are kept. Empty keeps all."""
    min_words: int = limited(5, low=1)
    """Documents with fewer words are dropped."""
    redact: list[str] = several(
        "email", "phone", "sin", "ssn", "nir", "card", "iban", "postal", "ip", "passport", "account",
        "ramq", "ohip", "nino", "nrn", "ahv", "idnr", "rvnr", "idcard",
    )  # fmt: skip
    """Kinds of personal data to replace by placeholders; `name` also replaces names behind a title such as Mr. or Me."""
    near_duplicates: float = limited(0.8, low=0.0, high=1.0)
    """Documents whose runs of five words reach this Jaccard similarity are copies, of which one is kept; conversations are copies if they say the same words. 0 keeps all but equal ones."""
    evaluation: list[str] = several()
    """Files of evaluation questions and answers: a document that shares 13 words in a row with one is left out."""
    tokenizer: str = "train"
    """A Hugging Face tokenizer folder; `train` learns a byte-level BPE from the inputs."""
    vocab_size: int = limited(2048, low=300)
    """Size of the vocabulary when `data.tokenizer` is `train`."""
    seq_len: int = limited(256, low=8)
    """Tokens in a block."""
    validation_fraction: float = limited(0.05, low=0.0, high=0.5)
    """Share of the documents kept for validation; the choice follows the documents' content, not their order; conversations that begin alike stay together."""
    keep_work: bool = False
    """Keep the cleaned documents beside the blocks, so that another tokenizer or `seq_len` starts from them."""
    max_quarantined: float = limited(0.05, low=0.0, high=1.0)
    """Largest share of unreadable rows before the job stops."""
    shard_mb: float = limited(32.0, above=0)
    """Inputs are worked on in shards of about this many megabytes: a worker holds a few of them, and a killed run repeats at most one a worker."""
    row_group_blocks: int = limited(64, low=1)
    """Blocks in a Parquet row group: the unit of reading and of shuffling."""
    file_blocks: int = limited(512, low=1)
    """Blocks in one file of the data set, at least; 16,384 blocks of 4,096 tokens are about 70 MB."""
    shuffle_window: int = limited(4, low=1)
    """Row groups whose blocks are shuffled together; costs `shuffle_window * row_group_blocks * seq_len * 4` bytes a read task."""


@dataclass
class Lora:
    rank: int = limited(16, low=1)
    """Rank of the adapters."""
    alpha: float = limited(32.0, above=0)
    """Scale: an adapter's output is multiplied by alpha / rank."""
    dropout: float = limited(0.0, low=0.0, high=0.95)
    """Dropout on the adapters' input."""
    targets: list[str] = several()
    """Names of the linear layers that get adapters; empty: every linear layer but the output head. The stacked experts of a mixture are none and stay frozen."""
    modules_to_save: list[str] = several()
    """Further modules that are trained in full, such as embed_tokens and lm_head."""


@dataclass
class Model:
    path: Optional[str] = None
    """A Hugging Face model folder with safetensors; empty: random weights of the shape in `model.config`."""
    config: dict[str, Any] = mapping(
        model_type="llama", hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
    )
    """Keys of a Hugging Face config, used when `model.path` is empty; the vocabulary follows the tokenizer."""
    method: str = limited("full", choices=("full", "lora", "qlora"))
    """full: every weight is trained; lora: adapters on a frozen base; qlora: adapters on a base held in 4 bits."""
    lora: Lora = field(default_factory=Lora)
    precision: str = limited("bf16_mixed", choices=("fp32", "bf16_mixed", "bf16"))
    """bf16_mixed computes in bf16 on fp32 master weights; bf16 also keeps the weights in bf16; fp32 is exact and slow."""
    gradients: str = limited("fp32", choices=("fp32", "bf16"))
    """Where micro-batches add up for bf16 weights: bf16 takes half the memory of fp32, but loses small gradients, and the result then varies with the number of workers."""
    attention: str = limited("auto", choices=("auto", "flash_attention_2", "sdpa", "eager"))
    """auto takes FlashAttention-2 where it is installed and there is a GPU, else sdpa, or eager where the architecture has neither."""
    activation_checkpointing: str = limited("none", choices=("none", "full", "selective"))
    """Recompute layers in the backward pass: full is every layer, selective every second one."""
    compile: bool = False
    """Compile each decoder layer with torch.compile."""
    loss_chunk_tokens: int = limited(1024, low=0)
    """Tokens whose logits are held at once when the loss is computed; 0 holds them all."""
    sharding: str = limited("fsdp", choices=("fsdp", "zero3"))
    """The sharding engine: fsdp is PyTorch FSDP2; zero3 is DeepSpeed ZeRO-3 and needs the extra `deepspeed`. A run may change it when it is resumed."""
    replicate: int = limited(1, low=1)
    """Hybrid sharding: copies of the model; each is sharded over world_size / replicate workers."""
    offload: str = limited("none", choices=("none", "optimizer", "params"))
    """Keep optimizer states, or parameters and optimizer states, in host memory; with params, and under zero3, the node's CPUs make the optimizer step."""


@dataclass
class Train:
    epochs: int = limited(1, low=1)
    """Passes over the training blocks; each block is trained exactly once in each."""
    steps: Optional[int] = limited(None, low=1)
    """Stop after this many optimizer steps, before the epochs end; the schedule then spans these steps."""
    global_batch_size: int = limited(16, low=1)
    """Blocks in one optimizer step over all workers, whatever their number."""
    micro_batch_size: Union[int, str] = 4
    """Blocks in one forward pass of one worker; `auto` takes the largest that the memory plan allows."""
    learning_rate: float = limited(3e-3, above=0)
    """Peak learning rate."""
    min_lr_ratio: float = limited(0.1, low=0.0, high=1.0)
    """The schedule ends at this share of the peak."""
    warmup_steps: int = limited(20, low=0)
    """Steps of linear warm-up."""
    schedule: str = limited("cosine", choices=("cosine", "linear", "constant"))
    """Shape after the warm-up."""
    optimizer: str = limited("adamw", choices=("adamw", "adamw_bf16", "adamw_8bit"))
    """adamw: states in fp32; adamw_bf16: weights or states in bf16 with stochastic rounding; adamw_8bit: states in 8 bits."""
    weight_decay: float = limited(0.1, low=0.0)
    """Decoupled weight decay on matrices; vectors (norms, biases) have none."""
    beta1: float = limited(0.9, low=0.0, high=0.9999)
    """AdamW's decay of the first moment."""
    beta2: float = limited(0.95, low=0.0, high=0.99999)
    """AdamW's decay of the second moment."""
    eps: float = limited(1e-8, above=0)
    """AdamW's epsilon."""
    max_grad_norm: float = limited(1.0, above=0)
    """Gradients are scaled down to this global norm."""
    dry_run: bool = True
    """A new run passes one micro-batch of full length forward and backward before the data starts: what does not fit shows in the first minute."""
    spike_sigma: float = limited(0.0, low=0.0)
    """Skip a step whose loss lies this many standard deviations above the recent mean; 0 never does."""
    max_bad_steps: int = limited(5, low=1)
    """Skipped steps in a row after which the run stops with the last good checkpoint."""


@dataclass
class Validation:
    every: int = limited(50, low=0)
    """Steps between validations; 0 validates at the start and the end only."""
    at_start: bool = True
    """Validate before the first step."""
    max_blocks: Optional[int] = limited(None, low=1)
    """Validate on the first so many blocks; empty: on all, which for a large split takes hours each time (jobs/plan.py says how long)."""


@dataclass
class Checkpoint:
    every: Union[int, str] = 50
    """Steps between checkpoints; `auto` follows the Young-Daly rule from the measured stall and `cluster.mtbf_hours`."""
    keep_last: int = limited(2, low=1)
    """Newest checkpoints to keep."""
    keep_best: int = limited(1, low=0)
    """Checkpoints of lowest validation loss to keep beside them."""
    keep_every: int = limited(0, low=0)
    """Also keep every checkpoint whose step is a multiple of this; 0 keeps none for that reason."""
    at_end: bool = True
    """Save the state in which a run ends or stops; without it, a run that is stopped continues from the newest earlier checkpoint."""
    asynchronous: bool = True
    """Train on while a checkpoint is written; training stops only for the copy to host memory."""
    retries: int = limited(8, low=0)
    """Tries of one storage operation before a save is given up; the waits double from half a second."""


@dataclass
class Cluster:
    address: str = "auto"
    """auto: the cluster that RAY_ADDRESS names (in a submitted job, its own), else a new one on this machine; local: always a new one here."""
    dashboard: bool = True
    """Start the Ray dashboard with a cluster that is started here."""
    workers: list[int] = several(2, 2)
    """[least, most] workers, one a GPU: the group shrinks and grows between them as nodes leave and join."""
    device: str = limited("auto", choices=("auto", "cpu", "gpu"))
    """auto takes GPUs where the cluster has them, and insists on them where `hardware.gpu` names one."""
    cpus_per_worker: float = limited(1.0, above=0)
    """CPUs that Ray reserves for a worker."""
    max_failures: int = limited(100, low=0)
    """Restarts of the worker group before the run gives up. The same error twice at one step ends it at once, as do broken connections three times."""
    mtbf_hours: float = limited(200.0, above=0)
    """Mean time between failures of one node, for `checkpoint.every: auto` and for the plan."""
    resize_check_s: float = limited(10.0, above=0)
    """How often the group looks whether it can grow."""
    start_timeout_s: float = limited(10.0, above=0)
    """How long a worker group may wait for its resources before it is tried with fewer workers."""


@dataclass
class Tracking:
    mlflow: Optional[str] = "sqlite"
    """MLflow tracking URI; `sqlite` is a database in `run.path`; empty: no MLflow."""
    experiment: str = "raytune70b"
    """The MLflow experiment that the run belongs to."""
    parent_run: Optional[str] = None
    """MLflow run id under which this run stands as a child, such as a sweep's."""
    wandb: str = limited("off", choices=("off", "offline", "online"))
    """Weights & Biases; offline writes to the run folder for `wandb sync`. Needs the extra `wandb`."""
    tensorboard: bool = False
    """TensorBoard event files in the run folder, which must be local then."""
    console_every_s: float = limited(2.0, low=0.0)
    """Least seconds between two progress lines in a log; a terminal shows a live panel instead."""
    close_timeout_s: float = limited(60.0, above=0)
    """How long the end of a run waits for trackers that do not answer; what they lack is said in one line."""
    report: bool = True
    """Write `report.html` into the run folder at the end."""


@dataclass
class Budget:
    hours: Optional[float] = limited(None, above=0)
    """Hours that the run may take, all launches together."""
    usd: Optional[float] = limited(None, above=0)
    """Money that the run may cost, all launches together."""
    price_per_gpu_hour: Optional[float] = limited(None, low=0)
    """USD for one GPU for one hour; needed for `budget.usd`."""
    price_date: Optional[str] = None
    """The day of that price, YYYY-MM-DD: a price is an input with a date, never a constant."""
    price_source: Optional[str] = None
    """Where that price comes from."""
    price_list: Optional[str] = None
    """A CSV of further prices to plan with, in the columns of raytune70b/planning/prices.csv; empty: that file."""
    start: Optional[str] = None
    """The day the run begins, YYYY-MM-DD, for its end date; empty: today."""
    storage_usd_per_gb_month: float = limited(0.023, low=0)
    """Price of keeping the checkpoints and the data for a month of the run."""
    egress_usd_per_gb: float = limited(0.09, low=0)
    """Price of taking the finished model out of the cloud."""
    reserve_minutes: float = limited(0.0, low=0.0)
    """Minutes to leave at the end, beyond the last save and validation, such as for evaluation and export."""
    fit_schedule: bool = False
    """Shorten a new run's schedule at its start to the steps that the budget pays for, by the plan's speed."""


@dataclass
class Hardware:
    gpu: str = "cpu"
    """A GPU of raytune70b/planning/gpus.csv; `cpu` plans for this machine."""
    nodes: int = limited(1, low=1)
    """Machines."""
    gpus_per_node: int = limited(2, low=1)
    """GPUs in a machine."""
    network_gbit_s_per_gpu: Optional[float] = limited(None, above=0)
    """Network between machines, Gbit/s per GPU and direction; empty: what is usual for the GPU."""
    host_memory_gb: float = limited(16.0, above=0)
    """Host memory of one machine."""
    disk_gb: float = limited(100.0, above=0)
    """Disk or shared storage that holds the checkpoints."""
    storage_gb_s: float = limited(1.0, above=0)
    """GB/s at which one machine writes checkpoints to storage."""


@dataclass
class Claims:
    """What a report says about its run; the plan puts its own figures beside them and says which cannot be."""

    corpus_gb: Optional[float] = limited(None, above=0)
    """Raw text in GB; the plan counts 4 bytes a token. Used while `data.path` holds no data set yet."""
    corpus_tokens: Optional[float] = limited(None, above=0)
    """Tokens in the corpus, where they are known."""
    tokens_per_s_per_gpu: Optional[float] = limited(None, above=0)
    """Throughput of one GPU."""
    mfu_pct: Optional[float] = limited(None, above=0)
    """Model FLOPs utilisation, per cent of the GPU's dense bf16 peak."""
    gpu_use_pct: list[float] = several()
    """[low, high] per cent as nvidia-smi reports it: the time in which any kernel ran."""
    memory_use_pct: list[float] = several()
    """[low, high] per cent of the GPU's memory."""
    hours: Optional[float] = limited(None, above=0)
    """Wall-clock hours."""
    usd: Optional[float] = limited(None, above=0)
    """Cost of the whole run."""
    compute_usd: Optional[float] = limited(None, above=0)
    """Cost of its GPU hours."""
    price_per_gpu_hour: Optional[float] = limited(None, above=0)
    """Price of one GPU hour."""
    comparison_usd_per_instance_hour: Optional[float] = limited(None, above=0)
    """Price of the 8-GPU instance of a hyperscaler that the report compares with."""
    comparison_usd: Optional[float] = limited(None, above=0)
    """What the report says the whole run would have cost there."""


@dataclass
class Sweep:
    """What `jobs/sweep.py` tries. Factors multiply the run's own settings; an empty list leaves that setting alone."""

    name: str = "sweep"
    """The sweep's folder under `run.path`; the same name again runs only what is missing."""
    data_fraction: float = limited(0.25, above=0, high=1.0)
    """Share of the full run's tokens that one trial trains on; its row groups are drawn by `run.seed` and are the same for all trials."""
    low: Optional[float] = limited(None, above=0)
    """Lowest learning rate tried at first; empty: a 16th of `train.learning_rate`."""
    high: Optional[float] = limited(None, above=0)
    """Highest learning rate tried at first; empty: 16 times `train.learning_rate`."""
    points: int = limited(5, low=3)
    """Learning rates tried at first, evenly spaced in their logarithm, both ends among them."""
    extensions: int = limited(3, low=0)
    """Rates added beyond an end, one after the other, while the best one lies there."""
    repeats: int = limited(2, low=1)
    """Further seeds of the best rate: they measure the noise that differences must exceed."""
    batch_factors: list[float] = several(0.5, 2.0)
    """Global batch sizes tried at the best rate, at the same number of tokens; the rate follows by `sweep.batch_exponent`."""
    warmup_factors: list[float] = several(0.5, 2.0)
    """Lengths of the warm-up tried at the best rate and batch."""
    rank_factors: list[float] = several(0.5, 2.0)
    """LoRA ranks tried at the best rate, alpha / rank held; only where `model.method` has adapters."""
    patience: float = limited(2.0, low=1.0)
    """A trial is stopped when its loss is this many times as far above the leader's final loss as the leader's was at that point of the schedule."""
    batch_exponent: float = limited(0.5, low=0.0, high=1.0)
    """The best rate grows with this power of the global batch (Adam: Malladi et al. 2022, arXiv 2205.10287)."""
    horizon_exponent: float = limited(0.32, low=0.0, high=1.0)
    """The best rate falls with this power of the tokens of a run (Bjorck et al. 2025, arXiv 2409.19913); 0 takes it over as it is."""
    workers: Optional[int] = limited(None, low=1)
    """Workers of a trial; empty: the least of `cluster.workers`. Losses do not depend on it, see `train.global_batch_size`."""
    max_concurrent: Optional[int] = limited(None, low=1)
    """Most trials at a time; empty: as many as the cluster has room for."""
    hours: Optional[float] = limited(None, above=0)
    """Hours that the sweep may take, all launches together."""
    usd: Optional[float] = limited(None, above=0)
    """Money that the trials may cost at `budget.price_per_gpu_hour`."""
    share: Optional[float] = limited(None, above=0)
    """Tokens that the trials may train on, as a share of the full run's."""

    def range(self, learning_rate: float) -> tuple[float, float]:
        """The lowest and the highest rate tried at first, for a full run with `learning_rate`."""
        return self.low or learning_rate / RANGE, self.high or learning_rate * RANGE


@dataclass
class Evaluation:
    model: Optional[str] = None
    """A Hugging Face model folder to evaluate in place of a run's checkpoint."""
    base: Optional[str] = None
    """The model folder to compare with; empty: what the run started from."""
    compare: bool = True
    """Evaluate the base model too, and show the change with its interval."""
    max_texts: Optional[int] = limited(2000, low=1)
    """Held-out documents to score, spread over the validation split; empty: all."""
    max_conversations: Optional[int] = limited(500, low=1)
    """Held-out conversations whose answers are generated; empty: all."""
    max_new_tokens: int = limited(96, low=1)
    """Longest answer in tokens."""
    batch_size: int = limited(32, low=1)
    """Prompts answered at once by one worker."""
    batch_tokens: int = limited(16384, low=1)
    """Tokens scored at once by one worker."""
    dtype: str = limited("auto", choices=("auto", "fp32", "bf16", "fp16"))
    """Precision to compute in; auto is the model folder's own."""
    gpus_per_model: int = limited(1, low=1)
    """GPUs that one copy of the model is spread over, where there are GPUs; `cluster.workers` copies work side by side."""
    resamples: int = limited(1000, low=10)
    """Bootstrap samples behind every interval."""
    confidence: float = limited(0.95, above=0, high=0.999)
    """Share of the bootstrap samples inside an interval."""
    samples: int = limited(24, low=0)
    """Answers shown side by side on the page."""
    every: int = limited(0, low=0)
    """Steps between evaluations of answers while training goes on: of the first checkpoint at or after each, beside the workers; 0: none."""
    every_conversations: int = limited(32, low=1)
    """Held-out conversations whose answers such an evaluation generates."""
    tasks: list[str] = several()
    """Public tasks to score as well, by lm-eval: their data must be on disk. Needs the extra `lm-eval`."""
    tasks_path: Optional[str] = None
    """A folder with further task files of lm-eval."""
    tasks_limit: Optional[int] = limited(None, low=1)
    """Items of each task, from its start; empty: all."""


@dataclass
class Export:
    path: Optional[str] = None
    """Where the model folder goes: a folder or any fsspec URI; empty: `export` in the run folder."""
    checkpoint: Union[int, str] = "newest"
    """Which checkpoint: newest, best (lowest validation loss), or a step."""
    dtype: str = limited("auto", choices=("auto", "fp32", "bf16", "fp16"))
    """Precision of the exported weights; auto is that of the base model's files, whatever `model.precision` is, or without a base that of the trained weights."""
    merge_onto: str = limited("trained", choices=("trained", "original"))
    """Adapters are merged onto the base as it rested in training (4-bit with qlora), or onto the base's own weights."""
    shard_gb: float = limited(5.0, above=0)
    """Size of one safetensors file in GB."""
    verify_logits: bool = True
    """Compare logits and a generation with the live model; holds one model in fp32 at a time in the driver's memory (4 bytes a parameter)."""
    overwrite: bool = False
    """Replace the model that is at `export.path`; until the new one is whole and checked the old one stays."""
    register: Optional[str] = "auto"
    """Name in MLflow's model registry; auto is the run's name; empty: not registered. MLflow stores a copy of the export."""


@dataclass
class Config:
    run: Run = field(default_factory=Run)
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    train: Train = field(default_factory=Train)
    validation: Validation = field(default_factory=Validation)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    cluster: Cluster = field(default_factory=Cluster)
    tracking: Tracking = field(default_factory=Tracking)
    budget: Budget = field(default_factory=Budget)
    hardware: Hardware = field(default_factory=Hardware)
    claims: Claims = field(default_factory=Claims)
    export: Export = field(default_factory=Export)
    evaluation: Evaluation = field(default_factory=Evaluation)
    sweep: Sweep = field(default_factory=Sweep)
