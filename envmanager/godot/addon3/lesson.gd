tool
class_name EnvManagerLesson, "res://addons/envmanager/icons/parameter.svg"
extends Resource
# Where the values of a parameter come from while it is in this lesson, and when the next lesson begins.

# What it is called in the output.
export(String) var name = ""
# How each episode draws the value. Empty: it is always `value`.
export(String, "", "uniform", "log_uniform", "normal", "choice", "multi_range_uniform") var sampler = ""
# The value without a sampler.
export(float) var value = 0.0
# The least value (uniform, log_uniform).
export(float) var minimum = 0.0
# The greatest value (uniform, log_uniform).
export(float) var maximum = 1.0
# The mean (normal).
export(float) var mean = 0.0
# The standard deviation (normal).
export(float) var std = 1.0
# The values to choose from (choice), or pairs of a least and a greatest one: [0, 1, 5, 7] (multi_range_uniform).
export(Array) var values = []
# What ends the lesson: reward (the mean return), progress (the share of all steps), or a number of info() by its name.
export(String) var measure = ""
# The lesson ends when the measure is at least this.
export(float) var threshold = 0.0
# How many episodes it lasts at least, of which the mean counts. 0: 100, or 1 for progress.
export(int, 0, 100000) var episodes = 0
# The behavior whose agents count, if the game has several.
export(String) var behavior = ""
