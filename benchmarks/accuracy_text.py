"""The words of docs/accuracy.md; `benchmarks.accuracy` fills in the tables."""

TEXT = """# How accurate the predictions are

Written by `python -m benchmarks.accuracy` from the {rows} published, measured steps in `tests/data/published_runs.yaml` (every row names
its source; suspects count). The error is predicted over measured, minus 1; mean, median and percentiles are of its size, bias is its mean.
`meshwright validate tests/data/published_runs.yaml` prints every row; `--plot FILE.svg` draws them.

## What choosing needs: ratios of times
A plan is chosen by ratios: how much faster one layout is than another. A pair is two measured runs of one model, machine, batch,
sequence length, precision and source that differ in layout or settings, by 2 % or more in time. Its error is the size of ln(predicted ratio)
- ln(measured ratio); its direction is right where the faster of the two is told. A factor that all rows of a source share cancels. No constant
that was fitted on a pair's source takes part, save in the line that says so; suspects are left out.

{pairs}

### What single settings bring, by device
Only this setting differs. The change of the step is the geometric mean over pairs, from less of the setting to more (or from none to it); rows
from {least_pairs} pairs on. Where predicted and measured part, a plan's choice of that setting leans on the model's word.

{gains}

## Blind figures of rows
The fit has seen these rows; here each is predicted by constants that were fitted without it: without all rows of its source (who measured),
of its model's family, of both together (nothing like it was seen: the nearest to a stranger's run), or of its software stack.

{blind}

## Runs that the fit has never seen
`tests/data/more_runs`, without suspects: other stacks, sweeps, releases and records. No refit sees them (but the rate of cuDNN up to 9.0 was chosen in sight of `nemo_h100_fp8_2024`, `nemo_long_sequence` and `mlperf_gpt3_175b`, that of the H20 in sight of its row in `ms_swift`, and that FP8 products of Blackwell's first containers reach no more than 16-bit ones in sight of `mlperf_llama31_405b`); frameworks that are not known are priced
as the nearest stack. Time of nanotron is one noisy step each, of which a fifth took over twice as long as others like them ([limits](limits.md#where-predictions-are-worst)); its host's pace was set in sight of its rows; of its memory, [a few own runs](few_runs.md) says what no row states.

{unseen}

Fit or not (layouts of one sweep that ran, and that ran out of memory): {fit}. A layout is told to fit where its peak is likelier than not to be below HBM less
context and NCCL's buffers.

## Few own runs, and beside the peers
How the error falls as `meshwright calibrate` sees a few runs of a stack: [a few own runs](few_runs.md), by `python -m benchmarks.few_shot`.
Calculon on the same rows, with its regret and its speed: [beside the peers](peers.md), by `python -m benchmarks.peers --calculon DIR`.
All dense rows of A100 beside Calculon, SimuMax and llm-analysis, source by source: [dense models](peers_dense.md), by `python -m benchmarks.peers.dense_a100`.

## How the constants were fitted
`make calibrate` refits {free} of the {records} constants in `devices.yaml` and `frameworks.yaml` of `costmodel/data`; the others are measurements, data-sheet ratios or
assumptions that say so. It makes least the sum over rows of 2 (sqrt(1 + (log(predicted / measured) / 0.03)^2) - 1) and over free
constants of (log(value / prior) / spread)^2, no constant further than 3 spreads from its prior. The prior is what a data sheet, a kernel
or a collective measurement lets one expect, or a round figure of the right size; where no such source exists, as for the waits of one
software stack, it came from an earlier look at some of these rows, so leaving a source out then flatters that constant a little.
No constant belongs to a row, a model or a source.

## Step time, constants fitted on these rows
{time}

### Plan regret
Rows that share model, cluster, GPUs, sequence length and global batch are a group, from four rows on if these are of two settings or more, suspects left out.
The regret of a group is the measured time of the settings predicted fastest over the best measured time, minus 1. Repeats of one setting, by several
releases of a stack too, count by the mean of their times, as the fastest of them is luck; so do settings with equal predictions. What could not be priced is never the fastest.

{regret}: ties leave that much. Measured steps scatter too: five runs of one layout
(BLOOM-prequel-181B on 384 A100, tp 8, pp 6, micro-batch 4) took 114.0 to 121.5 s, 6.6 % apart.

### Regret of what measured pairs correct
`--objective expected` multiplies prices by [what measured pairs say of the gains of settings](gains.md). Here all groups from three
measured rows on, with constants and corrections of which no source of the group was part:

{posterior}

![Predicted against measured step time](accuracy/fitted.svg)

## A source left out
Each source (what stands before the first semicolon of a row's `source`) is left out in turn, the constants are refitted on the others, and the
source is predicted. A source that alone measured a framework leaves that framework's constants at their priors. Refits {refits}.

{sources}

![Predicted against measured step time, source left out](accuracy/source_left_out.svg)
![Error by source](accuracy/by_source.svg)

## A model family left out
Families by the beginning of the model's name: {rules}. BLOOM is a GPT with ALiBi, most of both measured with one stack: one
family, the harder test.

{families}

![Error by model family](accuracy/by_family.svg)

## Memory
{memory}

What a source reports differs: SimuMax reports the allocator's peak per rank, which is what the model predicts; BLOOM rows are `nvidia-smi` readings,
compared with that peak plus fragments and context; torchtitan rows are what the allocator reserved, and its operator-level recomputation is only approximated.

## The band on a run and on a plan
Of a run that somebody states (`estimate`, `validate`), `predicted.error_band` holds the 5th and 95th percentile of measured over predicted for the device's class and the framework, of runs predicted with
their source left out (`costmodel/data/error_bands.yaml`). With n runs of its own a pair takes n / (n + 10) of their percentiles and the rest of the next
wider group's: the device class on any framework, then the framework on any device, then all runs. `rows` and `basis` say whose runs they are. Of a plan, which a search picked, it is wider: [the band of an optimum](recipes.md#the-band-of-an-optimum); `band_of` says which it is.

## Free constants
At most 12 act on a device (its own, its architecture's, the defaults and all shared ones) and 8 on a framework; a test counts them.

{counts}

## Limits
- Constants of one framework do not carry over to another (host times above all); `costmodel/data/frameworks.yaml` says which profile a target takes.
- No measured row exists for V100, L40S and MI300X, and of the H200 only those of one GPU that no fit has seen (`tests/data/own_runs`): their constants are assumed, and say so in the YAML. Those of H20 and MI325X follow from published kernel rates; rows of them are scored, none fitted.
- Attention with sinks is priced by one factor fitted on gpt-oss, the only such model among the rows. Runs of release 26.08 (GB200 and GB300, whole graphs, attention in FP8) are
  priced 11 to 12 % too slow, and 26.06.01 on GB200 was 1.6 times as slow as 26.06 and 26.08: the release alone does not say which kernels run.
- A step that nearly fills HBM (over 92 %) was measured 21 to 27 % slower than predicted, because the allocator stalls; plans stay below that.
"""
