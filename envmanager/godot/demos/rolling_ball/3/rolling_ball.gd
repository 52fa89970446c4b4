extends "res://addons/envmanager/arena.gd"
# A ball is pushed by two forces, along x and y, and should reach the goal.

const WIDTH := 400.0
const MARGIN := 40.0
const FORCE := 400.0
const FAST := 300.0
const GOAL_RADIUS := 50.0
const MAX_TICKS := 480

var ticks := 0
var distance := 0.0

onready var ball: RigidBody2D = $"../Ball"
onready var goal: Node2D = $"../Goal"


func reset(from: RandomNumberGenerator, _options: Dictionary) -> void:
	var start = _anywhere(from)
	goal.position = _anywhere(from)
	while goal.position.distance_to(start) < 3 * GOAL_RADIUS:
		goal.position = _anywhere(from)
	place_2d(ball, Transform2D(0.0, start))
	ball.applied_force = Vector2.ZERO
	ticks = 0
	distance = goal.position.distance_to(start)


func observe() -> PoolRealArray:
	var at = ball.position / WIDTH
	var to = goal.position / WIDTH
	var speed = ball.linear_velocity / FAST
	return PoolRealArray([2 * at.x - 1, 2 * at.y - 1, speed.x, speed.y, to.x - at.x, to.y - at.y])


func act(continuous: PoolRealArray, _discrete: PoolIntArray) -> void:
	ball.applied_force = FORCE * Vector2(clamp(continuous[0], -1, 1), clamp(continuous[1], -1, 1))


func after_tick() -> void:
	var before = distance
	distance = goal.position.distance_to(ball.position)
	ticks += 1
	add_reward((before - distance) / WIDTH - 0.001)
	if distance < GOAL_RADIUS:
		add_reward(1.0)
		end_episode()
	elif ticks >= MAX_TICKS:
		end_episode(true)


func heuristic() -> void:
	var push = (goal.position - ball.position) / WIDTH * 4 - ball.linear_velocity / FAST
	if has_window():
		push.x = Input.get_action_strength("ui_right") - Input.get_action_strength("ui_left")
		push.y = Input.get_action_strength("ui_down") - Input.get_action_strength("ui_up")
	act(PoolRealArray([push.x, push.y]), PoolIntArray())


func _anywhere(from: RandomNumberGenerator) -> Vector2:
	return Vector2(from.randf_range(MARGIN, WIDTH - MARGIN), from.randf_range(MARGIN, WIDTH - MARGIN))
