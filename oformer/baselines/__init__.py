"""Simple methods to compare an operator with: the nearest training sample, and ridge regressions.

    baseline = PcaKernelRidge().fit(coords=x, inputs=u, targets=v)
    baseline.predict({"coords": x[0], "inputs": u[0]}, queries)

They take the same data as `OperatorRegressor`, in the same forms, and train in seconds, on a CPU. An operator that does
not beat them has not learned enough.

Where points differ from sample to sample, all functions are interpolated to one fixed set of common points, taken from
the training samples; predictions are interpolated from these to the query points. Interpolation is linear on a line.
In the plane and in space it is by thin-plate splines (Duchon, 1977), which on a few hundred scattered points lose at
most half of what piecewise linear functions lose; from more points than `SPLINE_POINTS`, or on periodic domains, it is
by moving least squares. Times and channels are further entries of the same vector. Query features are ignored.

Both regressions choose their settings by the leave-one-out error, which has a closed form (Allen's PRESS, 1974): with
the hat matrix H, the residual of sample i without sample i is that of the fit divided by 1 - H_ii.
"""

from oformer.baselines.compare import BASELINES, Comparison, compare, linear_channels
from oformer.baselines.methods import Baseline, NearestSample, Pca, PcaKernelRidge, PcaRidge
from oformer.baselines.resample import Interpolation, ThinPlateSpline
from oformer.baselines.superposition import SuperpositionRidge

__all__ = [
    "BASELINES",
    "Baseline",
    "Comparison",
    "Interpolation",
    "NearestSample",
    "Pca",
    "PcaKernelRidge",
    "PcaRidge",
    "SuperpositionRidge",
    "ThinPlateSpline",
    "compare",
    "linear_channels",
]
